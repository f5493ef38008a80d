"""API keys: who may generate, over HTTP and gRPC alike."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import ConfigError, Unauthenticated

_SCHEME = "bearer"


class ApiKeys:
    """The keys a deployment accepts; any key, or none, when the list is empty."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Read a file with one key a line; blank lines and lines that begin with ``#`` are skipped.

        Raises:
            ConfigError: it cannot be read or holds no key; the door is never left open by mistake.
        """
        if path is None:
            return cls()
        try:
            lines = [
                line.strip() for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"gateway.api_keys_file: cannot read {path}: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"gateway.api_keys_file: {path} holds no key")
        return cls(keys)

    def check(self, authorization: str | None) -> None:
        """Accept ``Bearer KEY``, the scheme in any case.

        Raises:
            Unauthenticated: keys are set and this is none of them.
        """
        if not self._keys:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode(errors="surrogatepass") if scheme.lower() == _SCHEME else b""
        # Every key is compared, each in constant time: neither which one matches nor how far shows.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if not any(matches):
            raise Unauthenticated("a valid API key is required: Authorization: Bearer KEY")
