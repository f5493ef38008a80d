"""API keys: who may generate, over HTTP and gRPC alike."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.errors import ConfigError, Unauthenticated

ENVIRONMENT_VARIABLE = "SPECDEC_API_KEYS"
"""Keys, separated by commas or blanks, beside those of the file."""

_SCHEME = "bearer"
CLIENT_NAME_BYTES = 8
"""Of a key's digest: it goes where the key must not."""


class ApiKeys:
    """The keys a deployment accepts; any key, or none, when the list is empty."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    @classmethod
    def load(cls, path: str | None, environment: Mapping[str, str] = os.environ) -> ApiKeys:
        """Read a file with one key a line, where blank lines and lines that begin with ``#`` are skipped,
        and the environment.

        Raises:
            ConfigError: one of them is given but cannot be read or holds no key; the door is never left open
                by mistake.
        """
        from_file = _keys_of_file(path) if path is not None else []
        listed = environment.get(ENVIRONMENT_VARIABLE)
        from_environment = listed.replace(",", " ").split() if listed is not None else []
        if listed is not None and not from_environment:
            raise ConfigError(f"{ENVIRONMENT_VARIABLE} is set but holds no key: unset it to ask for none")
        return cls([*from_file, *from_environment])

    @property
    def is_empty(self) -> bool:
        """Whether anybody may call."""
        return not self._keys

    def check(self, authorization: str | None) -> str:
        """Accept ``Bearer KEY``, the scheme in any case; returns the client's name, empty if no keys are set.

        Raises:
            Unauthenticated: keys are set and this is none of them.
        """
        if not self._keys:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode(errors="surrogatepass") if scheme.lower() == _SCHEME else b""
        # Every key is compared, each in constant time: neither which one matches nor how far shows.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if not any(matches):
            raise Unauthenticated("a valid API key is required: Authorization: Bearer KEY")
        return hashlib.blake2b(given, digest_size=CLIENT_NAME_BYTES).hexdigest()


def _keys_of_file(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        # Not the error itself: what cannot be decoded may be part of a key.
        raise ConfigError(f"gateway.api_keys_file: cannot read {path}: {type(error).__name__}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ConfigError(f"gateway.api_keys_file: {path} holds no key")
    return keys
