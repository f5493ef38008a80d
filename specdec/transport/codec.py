"""Messages as MessagePack, checked against their types when they arrive; nothing is unpickled."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from specdec.errors import ProtocolError

Value = TypeVar("Value")


def _array_to_wire(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not cross between processes")


def _array_from_wire(kind: Any, value: Any) -> object:
    if get_origin(kind) is not np.ndarray:
        raise NotImplementedError(f"{kind} does not cross between processes")
    shape, data = value
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)


def encode(value: object) -> bytes:
    """Dataclasses of `specdec.messages`, and whatever they hold; arrays by value."""
    return _encoder.encode(value)


class Decoder(Generic[Value]):
    """Reads values of one type.

    Args:
        kind: a dataclass, a tuple of them, or None's type. Arrays are read-only views of what came in.
    """

    def __init__(self, kind: type[Value]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_array_from_wire)

    def __call__(self, data: bytes | msgspec.Raw) -> Value:
        """The value.

        Raises:
            ProtocolError: the data is not of the type.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise ProtocolError(f"malformed message: {error}") from error
