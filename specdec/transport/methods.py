"""What can be called, with the types of arguments and answers: both ends read the same table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from specdec.messages import ProposeReply, ProposeRequest, RoundUpdate, VerifyReply, VerifyRequest
from specdec.transport.codec import Decoder
from specdec.types import GenerationRequest, SequenceId

Answer = TypeVar("Answer")


class Method(Generic[Answer]):
    """A method by its name.

    Args:
        name: unique at its server.
        args: the tuple type of its arguments.
        answer: what it returns, or each of the items it yields.
    """

    def __init__(self, name: str, args: type[tuple[object, ...]], answer: type[Answer]) -> None:
        self.name = name
        self.decode_args = Decoder(args)
        self.decode_answer = Decoder(answer)


NoneType = type(None)

PROPOSE = Method("propose", tuple[ProposeRequest], ProposeReply)
VERIFY = Method("verify", tuple[VerifyRequest], VerifyReply)
RELEASE = Method("release", tuple[Sequence[SequenceId]], NoneType)
SUBMIT = Method("submit", tuple[str, GenerationRequest], NoneType)
CANCEL = Method("cancel", tuple[Sequence[SequenceId]], NoneType)
UPDATES = Method("updates", tuple[str], RoundUpdate)
