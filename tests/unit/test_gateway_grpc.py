"""The gRPC API on a real server, seen by a real client."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.errors import (
    ConfigError,
    GenerationFailed,
    InvariantViolation,
    ServiceUnavailable,
    TooManyRequests,
)
from specdec.gateway import grpc_server
from specdec.gateway.events import collect
from specdec.gateway.grpc_messages import to_client_request
from specdec.gateway.grpc_server import SERVICE_NAME, start_grpc_server
from specdec.gateway.models import ServedModels
from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fakes import (
    EOS_ID,
    MODEL_NAME,
    VOCAB_SIZE,
    ScriptedBackend,
    byte_ids_of,
    eventually,
    logprob_of,
    token_ids_of,
    toy_config,
    toy_service,
    toy_tokenizer,
)
from tests.grpc_calls import channel_to, failure_of

COLOURS = [*byte_ids_of("red green blue"), EOS_ID]
EMOJI = "😀 👨‍👩‍👧 日本 мир"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def connected(backend, **options):
    """A channel to a server of its own."""
    async with channel_to(toy_service(backend, **options)) as channel:
        yield channel


@asynccontextmanager
async def stub_to(backend, **options):
    async with connected(backend, **options) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


def ask(text="one", speculative=None, wants=None, **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **(wants or {}),
        text=text,
        sampling=pb.SamplingOptions(**sampling),
        speculative=pb.SpeculativeOptions(**(speculative or {})),
    )


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return dict(error.trailing_metadata())


def bad_request_of(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest:
    """What a client that knows rich errors reads."""
    status = status_pb2.Status.FromString(metadata_of(error)["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    return bad_request


# Answers


@pytest.mark.parametrize("sizes", [(1,), (4,)])
async def test_generate(sizes):
    async with stub_to(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as stub:
        response = await stub.Generate(ask())
    assert response.id.startswith("gen-")
    assert response.model == MODEL_NAME
    (choice,) = response.choices
    assert (choice.index, choice.text) == (0, "red green blue")
    assert list(choice.token_ids) == COLOURS
    assert choice.finish_reason == pb.FINISH_REASON_STOP
    assert response.usage == pb.Usage(
        prompt_tokens=len(token_ids_of("one")),
        completion_tokens=len(COLOURS),
        total_tokens=len(token_ids_of("one")) + len(COLOURS),
    )
    assert not response.HasField("speculative_metrics")


@pytest.mark.parametrize("sizes", [(1,), (5,)])
async def test_stream_says_what_the_whole_answer_says(sizes):
    backend = ScriptedBackend([*byte_ids_of(EMOJI), EOS_ID], chunk_sizes=sizes)
    async with stub_to(backend) as stub:
        request = ask(speculative={"metrics": True})
        whole = await stub.Generate(request)
        *parts, last = [part async for part in stub.GenerateStream(request)]
    (choice,) = whole.choices
    assert "".join(part.text for part in parts) == choice.text == EMOJI
    assert [token_id for part in parts for token_id in part.token_ids] == list(choice.token_ids)
    assert all("\ufffd" not in part.text for part in parts)
    assert len({(part.id, part.model) for part in [*parts, last]}) == 1
    assert all(not part.finish_reason and not part.HasField("usage") for part in parts)
    assert (last.finish_reason, last.usage) == (pb.FINISH_REASON_STOP, whole.usage)
    assert last.speculative_metrics == whole.speculative_metrics
    assert whole.speculative_metrics.draft_acceptance_rate == 0.5
    assert whole.speculative_metrics.mean_acceptance_length == 2.0


async def test_stop_string_and_length():
    async with stub_to(ScriptedBackend(COLOURS, chunk_sizes=(4,))) as stub:
        (stopped,) = (await stub.Generate(ask(stop=["een bl"]))).choices
        (capped,) = (await stub.Generate(ask(max_tokens=3))).choices
    assert (stopped.text, stopped.finish_reason) == ("red gr", pb.FINISH_REASON_STOP)
    assert list(stopped.token_ids) == byte_ids_of("red green bl")
    assert (capped.text, capped.finish_reason) == ("red", pb.FINISH_REASON_LENGTH)


async def test_every_form_of_prompt():
    backend = ScriptedBackend(COLOURS)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    async with stub_to(backend) as stub:
        await stub.Generate(pb.GenerateRequest(messages=chat, model=MODEL_NAME))
        await stub.Generate(pb.GenerateRequest(text="red"))
        await stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6])))
    assert backend.requests[0].prompt_ids.count(EOS_ID) == 1
    assert backend.requests[1].prompt_ids == tuple(token_ids_of("red"))
    assert backend.requests[2].prompt_ids == (5, 6)


async def test_sampling_options_arrive_exactly():
    backend = ScriptedBackend(COLOURS)
    async with stub_to(backend) as stub:
        await stub.Generate(
            ask(
                temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0,
                repetition_penalty=1.1, logit_bias={5: -1.0}, seed=2**63 - 1, max_tokens=9,
                stop_token_ids=[11], ignore_eos=True, min_tokens=4, bad_words=["red"],
                speculative={"num_speculative_tokens": 0, "mode": pb.VERIFICATION_MODE_REJECTION},
            )
        )  # fmt: skip
    (request,) = backend.requests
    sampling = request.sampling
    # Doubles on the wire: the same request over HTTP and gRPC is the same law to the last bit.
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.seed, sampling.mode) == (1.1, 2**63 - 1, "rejection")
    assert sampling.logit_bias == ((5, -1.0),)
    assert (request.stop.max_tokens, request.stop.stop_token_ids) == (9, {11})
    assert request.max_draft_tokens == 0
    assert sampling.min_tokens == 4
    assert sampling.bad_words == (tuple(token_ids_of("red")), tuple(token_ids_of(" red")))


async def test_choices_of_a_seed_differ_whole_and_streamed():
    backend = ScriptedBackend(script_of=lambda request: [*byte_ids_of(f"{request.sampling.seed}"), EOS_ID])
    async with stub_to(backend) as stub:
        request = ask(wants={"n": 3}, seed=7, speculative={"metrics": True})
        whole = await stub.Generate(request)
        parts = [part async for part in stub.GenerateStream(request)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.choices[0].text == "7"
    assert len({choice.text for choice in whole.choices}) == 3
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    for choice in whole.choices:
        own = [part for part in parts if part.choice == choice.index]
        assert "".join(part.text for part in own) == choice.text
        reasons = [part.finish_reason for part in own]
        assert reasons == [0] * (len(own) - 1) + [pb.FINISH_REASON_STOP]
    assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].usage == whole.usage
    assert parts[-1].speculative_metrics == whole.speculative_metrics


@pytest.mark.parametrize("sizes", [(1,), (4,)])
async def test_logprobs_of_output_and_prompt(sizes):
    async with stub_to(ScriptedBackend(COLOURS, chunk_sizes=sizes)) as stub:
        request = ask("one two", wants={"logprobs": 1, "prompt_logprobs": True})
        (choice,) = (await stub.Generate(request)).choices
        parts = [part async for part in stub.GenerateStream(request)]
        (plain,) = (await stub.Generate(ask())).choices
        (zero,) = (await stub.Generate(ask(wants={"logprobs": 0}))).choices
        scoring = await stub.Generate(
            ask("one two", wants={"logprobs": 0, "prompt_logprobs": True}, max_tokens=0)
        )
    assert choice.text == "red green blue"  # the prompt is scored, not given back
    assert [token.token_id for token in choice.logprobs] == COLOURS
    assert [token.logprob for token in choice.logprobs] == [logprob_of(token_id) for token_id in COLOURS]
    assert choice.logprobs[0].token == b"r"
    assert [(top.token_id, top.token, top.logprob) for top in choice.logprobs[0].top] == [
        (0, b"<|endoftext|>", 0.0)
    ]
    assert [token.token_id for token in choice.prompt_logprobs] == token_ids_of("one two")
    assert [token.HasField("logprob") for token in choice.prompt_logprobs] == [False] + [True] * (
        len(token_ids_of("one two")) - 1
    )
    assert [token for part in parts for token in part.logprobs] == list(choice.logprobs)
    assert list(parts[0].prompt_logprobs) == list(choice.prompt_logprobs)
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
    assert (len(plain.logprobs), len(zero.logprobs), len(zero.logprobs[0].top)) == (0, len(COLOURS), 0)
    assert scoring.usage.completion_tokens == 0
    assert len(scoring.choices[0].prompt_logprobs) == len(token_ids_of("one two"))


async def test_every_message_with_parts_of_characters_is_valid():
    async with stub_to(ScriptedBackend(byte_ids_of("😀"))) as stub:
        (choice,) = (await stub.Generate(ask(wants={"logprobs": 0}, max_tokens=4))).choices
    assert b"".join(token.token for token in choice.logprobs).decode() == choice.text == "😀"


async def test_conversations_carry_names_and_calls():
    backend = ScriptedBackend(COLOURS)
    call = pb.ToolCall(id="1", name="look", arguments='{"at": "sky"}')
    messages = [
        pb.ChatMessage(role="user", content="a", name="me"),
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="blue", tool_call_id="1"),
    ]
    request = to_client_request(
        pb.GenerateRequest(messages=pb.ChatMessages(messages=messages)), "gen-1", None
    )
    (prompt,) = request.prompts
    assert prompt.messages[0].name == "me"
    assert prompt.messages[1].tool_calls[0].arguments == '{"at": "sky"}'
    assert prompt.messages[2].tool_call_id == "1"
    async with stub_to(backend) as stub:
        await stub.Generate(pb.GenerateRequest(messages=pb.ChatMessages(messages=messages)))
    assert "look" in toy_tokenizer().decode(backend.requests[0].prompt_ids)


async def test_zero_is_not_unset():
    backend = ScriptedBackend(COLOURS)
    async with stub_to(backend) as stub:
        await stub.Generate(ask(temperature=0.0))
        await stub.Generate(ask())
    assert [request.sampling.mode for request in backend.requests] == ["greedy", "rejection"]


async def test_model_info():
    async with stub_to(ScriptedBackend(is_open=False)) as stub:
        assert await stub.GetModelInfo(pb.GetModelInfoRequest()) == pb.GetModelInfoResponse(
            model=MODEL_NAME,
            max_context=256,
            vocab_size=VOCAB_SIZE,
            num_speculative_tokens=8,
            draft_model="org/toy-draft",
        )


# Errors

WRONG = [
    (ask(temperature=-1.0), "temperature"),
    (ask(temperature=math.nan), "temperature"),
    (ask(temperature=math.inf), "temperature"),
    (ask(top_p=math.nan), "top_p"),
    (ask(top_p=0.0), "top_p"),
    (ask(top_k=-2), "top_k"),
    (ask(min_p=1.5), "min_p"),
    (ask(presence_penalty=9.0), "presence_penalty"),
    (ask(frequency_penalty=-9.0), "frequency_penalty"),
    (ask(repetition_penalty=0.0), "repetition_penalty"),
    (ask(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
    (ask(logit_bias={-1: 1.0}), "logit_bias"),
    (ask(logit_bias={5: math.nan}), "logit_bias"),
    (ask(seed=-1), "seed"),
    (ask(max_tokens=0), "max_tokens"),
    (ask(stop=[""]), "stop"),
    (ask(stop=["x"] * 17), "stop"),
    (ask(stop_token_ids=[-1]), "stop_token_ids"),
    (ask(speculative={"num_speculative_tokens": 33}), "speculative.num_speculative_tokens"),
    (ask(speculative={"num_speculative_tokens": -1}), "speculative.num_speculative_tokens"),
    (ask(speculative={"mode": 7}), "speculative.mode"),
    (ask(speculative={"pipeline": 7}), "speculative.pipeline"),
    (ask(text=""), "prompt"),
    (ask(wants={"n": 0}), "n"),
    (ask(wants={"n": 17}), "n"),
    (ask(wants={"logprobs": -1}), "logprobs"),
    (ask(wants={"logprobs": 21}), "logprobs"),
    (ask(wants={"prompt_logprobs": True}), "prompt_logprobs"),
    (ask(min_tokens=-1), "min_tokens"),
    (ask(min_tokens=5, max_tokens=4), "min_tokens"),
    (ask(bad_words=[""]), "bad_words"),
    (ask(bad_words=["x"] * 65), "bad_words"),
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VOCAB_SIZE])), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 300)), "prompt"),
    (pb.GenerateRequest(messages=pb.ChatMessages()), "messages"),
    (
        pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="wizard")])),
        "messages[0].role",
    ),
]


async def test_wrong_fields_are_invalid_argument_naming_the_field():
    backend = ScriptedBackend(COLOURS)
    async with stub_to(backend) as stub:
        for request, param in WRONG:
            for call in (stub.Generate, stub.GenerateStream):
                error = await failure_of(call(request))
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, request
                assert metadata_of(error)["specdec-error-param"] == param
                (violation,) = bad_request_of(error).field_violations
                assert (violation.field, violation.description) == (param, error.details())
        assert backend.requests == []
        assert (await stub.Generate(ask())).choices[0].text == "red green blue"  # still alive


async def test_context_overflow_has_its_code():
    async with stub_to(ScriptedBackend(COLOURS)) as stub:
        error = await failure_of(stub.Generate(ask(max_tokens=256)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert metadata_of(error)["specdec-error-code"] == "context_length_exceeded"
    assert "256" in error.details()


async def test_unknown_model_is_not_found():
    async with stub_to(ScriptedBackend(COLOURS)) as stub:
        error = await failure_of(stub.Generate(pb.GenerateRequest(text="x", model="no-such-模型")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "no-such-模型" in error.details()
    assert metadata_of(error)["specdec-error-code"] == "model_not_found"


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (TooManyRequests("the queue is full"), "RESOURCE_EXHAUSTED", "the queue is full"),
        (ServiceUnavailable("no target"), "UNAVAILABLE", "no target"),
        (GenerationFailed("x" * 10_000), "UNAVAILABLE", "x" * 1000),
        (InvariantViolation("secret"), "INTERNAL", "internal error"),
        (ZeroDivisionError("secret"), "INTERNAL", "internal error"),
    ],
)
async def test_errors_of_the_backend_have_their_status(method, after, error, code, details):
    async with stub_to(ScriptedBackend(COLOURS, error=error, error_after=after)) as stub:
        caught = await failure_of(getattr(stub, method)(ask()))
    assert (caught.code().name, caught.details()) == (code, details)
    assert ("grpc-retry-pushback-ms" in metadata_of(caught)) == (code != "INTERNAL")


async def test_messages_over_the_limit_are_refused_cleanly():
    async with stub_to(ScriptedBackend(COLOURS), max_body_bytes=10_000) as stub:
        error = await failure_of(stub.Generate(ask("x" * 20_000)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Generate(ask())).choices[0].text  # still alive


async def test_messages_above_grpcs_own_default_limit_are_served():
    async with stub_to(ScriptedBackend(COLOURS), max_context=10**8) as stub:
        response = await stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 2_500_000)))
    assert response.usage.prompt_tokens == 2_500_000


# Clients that leave


@pytest.mark.parametrize("block_after", [3, 10_000])
async def test_cancel_in_mid_stream_closes_the_backend(block_after):
    backend = ScriptedBackend(byte_ids_of("ab"), block_after=block_after, delay_s=0.001)
    async with stub_to(backend, max_context=100_000) as stub:
        call = stub.GenerateStream(ask())
        await call.read()
        assert backend.num_running == 1
        call.cancel()
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 1


async def test_cancel_of_a_client_that_does_not_read_closes_the_backend():
    backend = ScriptedBackend(byte_ids_of("x"), chunk_sizes=(10_000,))
    async with stub_to(backend, max_context=10**7) as stub:
        call = stub.GenerateStream(ask())
        await call.read()
        await asyncio.sleep(0.2)  # until flow control blocks the server's writes
        call.cancel()
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 1


async def test_cancel_before_the_first_token_closes_the_backend():
    backend = ScriptedBackend(COLOURS, block_after=0)
    async with stub_to(backend) as stub:
        call = stub.Generate(ask())
        await eventually(lambda: backend.num_running == 1)
        call.cancel()
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 1


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_expired_deadline_closes_the_backend(method):
    backend = ScriptedBackend(COLOURS, block_after=2)
    async with stub_to(backend) as stub:
        started = time.monotonic()
        error = await failure_of(getattr(stub, method)(ask(), timeout=0.2))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 1.0
        await eventually(lambda: backend.num_running == 0)
    assert backend.num_closed == 1


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_the_servers_deadline_holds_without_the_clients(method):
    backend = ScriptedBackend(COLOURS, block_after=2)
    async with stub_to(backend, request_timeout_s=0.1) as stub:
        error = await failure_of(getattr(stub, method)(ask()))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert backend.num_closed == 1


# The server


async def test_health_follows_readiness():
    backend = ScriptedBackend(COLOURS, is_open=False)
    async with connected(backend) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses():
            requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE_NAME)]
            return {(await stub.Check(request)).status for request in requests}

        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == NOT_SERVING
        assert await statuses() == {NOT_SERVING}
        backend.is_open = True
        assert await statuses() == {SERVING}
        assert (await watch.read()).status == SERVING
        error = await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="no.such")))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_stop_lets_running_calls_finish_within_the_grace():
    backend = ScriptedBackend(COLOURS, delay_s=0.01)
    service = toy_service(backend)
    server = await start_grpc_server(ServedModels(service), service.config.gateway, backend.is_ready)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = asyncio.ensure_future(pb_grpc.GenerationServiceStub(channel).Generate(ask()))
        await eventually(lambda: backend.num_running == 1)
        await server.stop(grace_s=5.0)
        assert (await call).choices[0].text == "red green blue"


async def test_stop_without_grace_closes_running_calls():
    backend = ScriptedBackend(COLOURS, block_after=1)
    service = toy_service(backend)
    server = await start_grpc_server(ServedModels(service), service.config.gateway, backend.is_ready)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = pb_grpc.GenerationServiceStub(channel).GenerateStream(ask())
        await call.read()
        await server.stop()
        await eventually(lambda: backend.num_running == 0)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def test_replicas_on_one_node_share_the_port():
    service = toy_service(ScriptedBackend(COLOURS))
    first = await start_grpc_server(ServedModels(service), service.config.gateway, lambda: True)
    config = toy_config(grpc_port=first.port).gateway
    second = await start_grpc_server(ServedModels(service), config, lambda: True)
    assert second.port == first.port
    await first.stop()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
        answer = await pb_grpc.GenerationServiceStub(channel).Generate(ask())
        assert answer.choices[0].text == "red green blue"
    await second.stop()


async def test_an_address_that_cannot_be_bound_is_a_config_error():
    service = toy_service(ScriptedBackend())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await start_grpc_server(
            ServedModels(service), toy_config(grpc_host="192.0.2.1").gateway, lambda: True
        )


async def test_reflection_lists_the_service_or_says_what_is_missing(monkeypatch):
    service = toy_service(ScriptedBackend())
    config = toy_config(grpc_reflection=True).gateway

    def missing(name):
        raise ImportError(name)

    with monkeypatch.context() as patch:
        patch.setattr(grpc_server.importlib, "import_module", missing)
        with pytest.raises(ConfigError, match="grpcio-reflection"):
            await start_grpc_server(ServedModels(service), config, lambda: True)

    reflection_pb2 = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2")
    reflection_pb2_grpc = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2_grpc")
    server = await start_grpc_server(ServedModels(service), config, lambda: True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        assert SERVICE_NAME in [item.name for item in response.list_services_response.service]
        call.cancel()
    await server.stop()


async def test_grpc_and_the_neutral_service_agree():
    service = toy_service(ScriptedBackend(COLOURS))
    completion = await collect(service.generate(to_client_request(ask(), "gen-1", None)))
    async with stub_to(ScriptedBackend(COLOURS)) as stub:
        assert (await stub.Generate(ask())).choices[0].text == completion.choices[0].text
