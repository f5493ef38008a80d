"""The gRPC server: `GenerationService` of ``protos/specdec/v1`` and the standard health service."""

from __future__ import annotations

import asyncio
import importlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Never

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import GatewayConfig
from specdec.errors import ConfigError, DeadlineExceeded, InvariantViolation, SpecDecError
from specdec.gateway.events import collect
from specdec.gateway.faults import log_fault
from specdec.gateway.grpc_door import DecodeInterceptor, KeyInterceptor, client_name
from specdec.gateway.grpc_errors import trailing_metadata
from specdec.gateway.grpc_health import HealthServicer
from specdec.gateway.grpc_messages import to_client_request, to_prompt, to_response, to_stream_response
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "specdec.v1.GenerationService"
MAX_DETAILS_BYTES = 1000
"""Details travel in trailers, up to three times; clients bound these at a few KB."""


class GrpcServer:
    """A running server. Owned by the event loop it was started on."""

    def __init__(self, server: grpc.aio.Server, port: int, health: HealthServicer) -> None:
        self.port = port
        """The port it listens on, also where a free one was asked for."""
        self._server = server
        self._health = health

    async def stop(self, grace_s: float = 0.0) -> None:
        """Report NOT_SERVING, refuse new calls, and cancel running ones after ``grace_s`` seconds."""
        self._health.close()
        await self._server.stop(grace_s)


async def start_grpc_server(
    models: ServedModels, config: GatewayConfig, ready: Callable[[], bool]
) -> GrpcServer:
    """Start serving on the running event loop.

    Gateway replicas on one node share the port (``SO_REUSEPORT``): the kernel spreads connections over them.

    Args:
        models: answer the calls.
        config: address and limits.
        ready: asked by the health service.

    Raises:
        ConfigError: the address cannot be bound, or reflection is on but its package is missing.
    """
    server = grpc.aio.server(
        interceptors=(KeyInterceptor(models.keys), DecodeInterceptor()),
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", config.max_body_bytes),
        ],
    )
    health = HealthServicer(("", SERVICE_NAME), ready)
    pb_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(models), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if config.grpc_reflection:
        _enable_reflection(server)
    port = _bind(server, config)
    await server.start()
    return GrpcServer(server, port, health)


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Translates calls. A cancelled or expired call is a cancelled coroutine, which closes its generation."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> pb.GenerateResponse:
        async with self._answering(context) as client:
            service = self._models.service(request.model)
            call = to_client_request(request, _new_request_id(), context.time_remaining(), client)
            events = self._models.metrics.measured("grpc", service.model_name, service.generate(call))
            completion = await collect(events)
            return to_response(completion, call.request_id, service.model_name, request.speculative.metrics)

    async def GenerateStream(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateStreamResponse],
    ) -> None:
        # Written as a coroutine, not a generator: were it cancelled at a yield, its cleanup would be left to
        # the garbage collector.
        async with self._answering(context) as client:
            service = self._models.service(request.model)
            call = to_client_request(request, _new_request_id(), context.time_remaining(), client)
            events = self._models.metrics.measured("grpc", service.model_name, service.generate(call))
            async with aclosing(events):
                # A client that does not read blocks the write; it must not hold the sequence for ever.
                async with asyncio.timeout(service.timeout_s(call)):
                    async for event in events:
                        await context.write(
                            to_stream_response(
                                event, call.request_id, service.model_name, request.speculative.metrics
                            )
                        )

    async def GetModelInfo(
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        async with self._answering(context):
            service = self._models.service(request.model)
            config, info = service.config, service.model_info
            return pb.GetModelInfoResponse(
                model=service.model_name,
                max_context=info.max_context,
                vocab_size=info.vocab_size,
                num_speculative_tokens=config.max_speculative_tokens,
                draft_model=config.draft.model if config.draft else None,
            )

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        async with self._answering(context):
            return pb.ListModelsResponse(
                models=[
                    pb.ListedModel(model=service.model_name, is_ready=service.is_ready())
                    for service in self._models.services()
                ]
            )

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        async with self._answering(context):
            service = self._models.service(request.model)
            token_ids = await service.tokenize(to_prompt(request))
            return pb.TokenizeResponse(token_ids=token_ids, max_context=service.model_info.max_context)

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        async with self._answering(context):
            service = self._models.service(request.model)
            return pb.DetokenizeResponse(text=await service.detokenize(request.token_ids))

    @asynccontextmanager
    async def _answering(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[str]:
        """End the call with the status of the error raised inside, never with a trace.

        Yields:
            The client's name.
        """
        try:
            yield client_name.get()
        except SpecDecError as error:
            if error.grpc_code == "INTERNAL":
                log_fault(logger, "a gRPC call failed", error)
            await _abort(context, error)
        except TimeoutError:
            await _abort(context, DeadlineExceeded("the request was not finished by its deadline"))
        except Exception as error:
            log_fault(logger, "a gRPC call failed", error)
            await _abort(context, InvariantViolation("internal error"))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: SpecDecError) -> Never:
    details = "internal error" if error.grpc_code == "INTERNAL" else error.message
    details = details.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")
    await context.abort(grpc.StatusCode[error.grpc_code], details, trailing_metadata(error, details))
    raise AssertionError("abort raises")


def _new_request_id() -> str:
    return f"gen-{uuid.uuid4().hex}"


def _bind(server: grpc.aio.Server, config: GatewayConfig) -> int:
    host = f"[{config.grpc_host}]" if ":" in config.grpc_host else config.grpc_host
    address = f"{host}:{config.grpc_port}"
    credentials = _credentials(config)
    try:
        if credentials is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"gateway.grpc_host/grpc_port: cannot listen on {address}") from error
    return port


def _credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    if config.grpc_tls_cert is None or config.grpc_tls_key is None:
        return None
    try:
        key, cert = (
            Path(path).expanduser().read_bytes() for path in (config.grpc_tls_key, config.grpc_tls_cert)
        )
    except OSError as error:
        raise ConfigError(f"gateway.grpc_tls_cert/grpc_tls_key: {error}") from error
    return grpc.ssl_server_credentials([(key, cert)])


def _enable_reflection(server: grpc.aio.Server) -> None:
    try:
        reflection = importlib.import_module("grpc_reflection.v1alpha.reflection")
    except ImportError as error:
        raise ConfigError("gateway.grpc_reflection needs the package grpcio-reflection") from error
    names = (
        SERVICE_NAME,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
