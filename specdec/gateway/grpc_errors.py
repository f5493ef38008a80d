"""Trailing metadata of a failed gRPC call: which error it was, of which field, and when to try again."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.errors import SpecDecError
from specdec.gateway.retry import retry_after_s

Metadata = tuple[tuple[str, str | bytes], ...]


def trailing_metadata(error: SpecDecError, details: str) -> Metadata:
    """What clients find behind the status.

    Where trying again is worth it: ``grpc-retry-pushback-ms``, which clients with a retry policy heed by
    themselves, and ``google.rpc.RetryInfo`` in ``grpc-status-details-bin``; there also, where a field is at
    fault, ``google.rpc.BadRequest``.

    Args:
        error: what went wrong.
        details: the status's message, which the second one repeats.
    """
    named = (("specdec-error-code", error.code), ("specdec-error-param", error.param))
    metadata: Metadata = tuple((key, value) for key, value in named if value)
    delay_s = retry_after_s(error)
    if delay_s is not None:
        pushback = ("grpc-retry-pushback-ms", str(round(delay_s * 1000)))
        return (*metadata, pushback, *_rich(error.grpc_code, details, _retry_info(delay_s)))
    if error.param is not None and error.grpc_code == "INVALID_ARGUMENT":
        return (*metadata, *_rich(error.grpc_code, details, _bad_request(error.param, details)))
    return metadata


def _retry_info(delay_s: float) -> Message:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(delay_s * 1000))
    info: Message = error_details_pb2.RetryInfo(retry_delay=delay)
    return info


def _bad_request(field: str, description: str) -> Message:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    bad_request: Message = error_details_pb2.BadRequest(field_violations=[violation])
    return bad_request


def _rich(code: str, details: str, message: Message) -> Metadata:
    detail = any_pb2.Any()
    detail.Pack(message)
    status = status_pb2.Status(code=code_pb2.Code.Value(code), message=details, details=[detail])
    converted: grpc.Status = rpc_status.to_status(status)
    trailing: Metadata = converted.trailing_metadata
    return trailing
