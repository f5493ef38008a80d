"""The errors specdec raises on purpose, each with what a client should be told.

.. code-block:: text

    SpecDecError                        HTTP  gRPC                 retry?
     x ConfigError                      -     -                    no: fix the configuration
       · IncompatiblePair               -     -                    no: choose another draft
       · ModelUnavailable               -     -                    no: fix the name or the download
     x RequestError                     400   INVALID_ARGUMENT     no: fix the request
       · InvalidRequest                 400   INVALID_ARGUMENT     no
       · ContextLengthExceeded          400   INVALID_ARGUMENT     no: shorten the prompt
       · Unauthenticated                401   UNAUTHENTICATED      with a valid key
       · UnknownModel                   404   NOT_FOUND            no
       · TooManyRequests                429   RESOURCE_EXHAUSTED   yes, after a pause
     x ServiceUnavailable               503   UNAVAILABLE          yes, after a pause
       · GenerationFailed               503   UNAVAILABLE          yes
       · CoordinatorLost                503   UNAVAILABLE          the gateway resumes elsewhere first
     x DeadlineExceeded                 504   DEADLINE_EXCEEDED    with a longer deadline
     x WorkerError                      -     -                    handled inside the coordinator
       · DraftUnavailable               -     -                    target-only rounds until one is back
       · TargetUnavailable              -     -                    sequences move to another target
       · TargetFailed                   -     -                    the sequence at fault fails with 503
     x ProtocolError                    500   INTERNAL             no: a stale or malformed message
       · StaleCache                     -     -                    coordinator re-prefills from the log
     x KVCacheFull                      -     -                    sequence waits, or runs without draft
     x InvariantViolation               500   INTERNAL             no: our bug

Errors cross process boundaries as their class's name and arguments (`specdec.transport`), or pickled within
Ray, so every class takes the same three.
"""

from __future__ import annotations


class SpecDecError(Exception):
    """Root of the tree."""

    http_status: int = 500
    """HTTP status code a client sees."""
    grpc_code: str = "INTERNAL"
    """Name of the ``grpc.StatusCode`` member a client sees."""
    error_type: str = "server_error"
    """``error.type`` in the OpenAI error envelope."""
    code: str | None = None
    """``error.code`` in the OpenAI error envelope."""

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param, retry_after_s)
        self.message = message
        self.param = param
        """Name of the request field at fault, if one is."""
        self.retry_after_s = retry_after_s
        """When it is worth trying again, where that has been estimated."""

    def __str__(self) -> str:
        return self.message


class ConfigError(SpecDecError):
    """The deployment's configuration cannot work; raised at start, before serving."""


class IncompatiblePair(ConfigError):
    """Draft and target do not share a vocabulary."""


class ModelUnavailable(ConfigError):
    """A model's files cannot be found, fetched, verified or served."""


class RequestError(SpecDecError):
    """The client's request cannot be served as it stands."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is unknown, malformed or out of range; ``param`` names it."""


class ContextLengthExceeded(RequestError):
    """The prompt (plus requested tokens) does not fit the target's context."""

    code = "context_length_exceeded"


class Unauthenticated(RequestError):
    """API keys are set and the request carries none of them."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    code = "invalid_api_key"


class UnknownModel(RequestError):
    """The named model is not served here."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "model_not_found"


class TooManyRequests(RequestError):
    """The bounded queue is full, or the client has its share of it."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ServiceUnavailable(SpecDecError):
    """Nothing is ready to serve this request; retry after a pause."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable"
    code = "service_unavailable"


class GenerationFailed(ServiceUnavailable):
    """A request that had started could not be completed."""


class CoordinatorLost(ServiceUnavailable):
    """A coordinator died or does not answer; what it had committed is known."""


class DeadlineExceeded(SpecDecError):
    """The request's own deadline passed before it was finished."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout"
    code = "deadline_exceeded"


class WorkerError(SpecDecError):
    """A worker did not answer; caught by the coordinator, never shown to a client."""


class DraftUnavailable(WorkerError):
    """The draft worker died or missed its deadline."""


class TargetUnavailable(WorkerError):
    """The target worker died or missed its deadline."""


class TargetFailed(WorkerError):
    """The target worker lives, but a call failed in it."""


class ProtocolError(SpecDecError):
    """A message is malformed or belongs to another epoch."""


class StaleCache(ProtocolError):
    """A feed builds on cache positions the worker does not hold."""


class KVCacheFull(SpecDecError):
    """The worker has no KV cache left for a sequence."""


class InvariantViolation(SpecDecError):
    """Something that cannot happen happened: a bug in specdec."""
