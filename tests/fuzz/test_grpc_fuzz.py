"""gRPC: whatever message is sent, the status is one of the documented ones; never INTERNAL, never UNKNOWN."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc
from tests.fuzz.scale import num_cases

TIMEOUT_S = 30.0
MAX_ITEMS = 3
MAX_DETAILS_CHARS = 1000
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
GOOD = pb.GenerateRequest(text="one", sampling=pb.SamplingOptions(max_tokens=2, temperature=0.0))

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "😀", "<|im_end|>", "user", "assistant", "tool", "a" * 5000]),
)
_INT32 = st.one_of(st.sampled_from([-(2**31), -1, 0, 1, 2, 16, 33, 2**31 - 1]), st.integers(-3, 400))
_INT64 = st.one_of(st.sampled_from([-(2**63), -1, 0, 2**63 - 1]), _INT32)
_UINT = st.one_of(st.sampled_from([0, 1, 2**32 - 1]), st.integers(0, 400))
_FLOATS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1e-6, 1e300])
)
SCALARS = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_UINT32: _UINT,
    FieldDescriptor.TYPE_UINT64: _UINT,
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=8),
    # Values of later versions arrive too.
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 5),
}


def set_field(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    """Give one field a drawn value, whatever kind it is."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        for _ in range(draw(st.integers(0, MAX_ITEMS))):
            key, value = (draw(SCALARS[entry[name].type]) for name in ("key", "value"))
            getattr(message, field.name)[key] = value
    elif field.is_repeated and field.message_type is not None:
        for _ in range(draw(st.integers(0, MAX_ITEMS))):
            fill(draw, getattr(message, field.name).add())
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(SCALARS[field.type], max_size=MAX_ITEMS)))
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        fill(draw, getattr(message, field.name))
    else:
        setattr(message, field.name, draw(SCALARS[field.type]))


def fill(draw: st.DrawFn, message: Message) -> None:
    """Set some of the fields."""
    fields = list(message.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda item: item.name)):
        set_field(draw, message, field)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """A good request with some fields replaced, at times a random one."""
    request = pb.GenerateRequest()
    if draw(st.integers(0, 3)):
        request.CopyFrom(GOOD)
    fill(draw, request)
    if draw(st.booleans()):
        set_field(draw, request.sampling, draw(st.sampled_from(list(request.sampling.DESCRIPTOR.fields))))
    return request


run_settings = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def status_of(call):
    """The status of a call, its details, and its answer where it has one."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error.code(), error.details(), None
    return grpc.StatusCode.OK, "", answer


def test_any_message_has_a_documented_status(gateway):
    codes = []
    with grpc.insecure_channel(gateway.grpc_address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        @settings(run_settings, max_examples=num_cases(0.7))
        @given(request=requests(), is_streamed=st.booleans())
        def ask(request, is_streamed):
            if is_streamed:
                stream = stub.GenerateStream
                code, details, messages = status_of(lambda: list(stream(request, timeout=TIMEOUT_S)))
                if messages is not None:
                    assert messages[-1].HasField("usage")
            else:
                code, details, _ = status_of(lambda: stub.Generate(request, timeout=TIMEOUT_S))
            codes.append(code)
            assert code in EXPECTED, (code, request)
            assert len(details) <= MAX_DETAILS_CHARS
            assert "Traceback" not in details

        ask()
        assert stub.Generate(GOOD, timeout=TIMEOUT_S).usage.completion_tokens == 2
    assert codes.count(grpc.StatusCode.OK) > len(codes) // 20, "too few come far enough to be served"


@st.composite
def tokenizer_requests(draw: st.DrawFn) -> pb.TokenizeRequest | pb.DetokenizeRequest:
    request = draw(st.sampled_from([pb.TokenizeRequest, pb.DetokenizeRequest]))()
    fill(draw, request)
    return request


def test_any_message_to_the_tokenizer_has_a_documented_status(gateway):
    codes = set()
    with grpc.insecure_channel(gateway.grpc_address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        @settings(run_settings, max_examples=num_cases(0.2))
        @given(request=tokenizer_requests())
        def ask(request):
            method = stub.Tokenize if isinstance(request, pb.TokenizeRequest) else stub.Detokenize
            code, _, _ = status_of(lambda: method(request, timeout=TIMEOUT_S))
            codes.add(code)
            assert code in EXPECTED, (code, request)

        ask()
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes


def test_bytes_that_are_no_message_do_no_harm(gateway):
    with grpc.insecure_channel(gateway.grpc_address) as channel:
        raw = channel.unary_unary("/specdec.v1.GenerationService/Generate")

        @settings(run_settings, max_examples=num_cases(0.1))
        @given(content=st.binary(max_size=60))
        def ask(content):
            code, _, _ = status_of(lambda: raw(content, timeout=TIMEOUT_S))
            assert code in EXPECTED

        ask()
        stub = pb_grpc.GenerationServiceStub(channel)
        assert stub.Generate(GOOD, timeout=TIMEOUT_S).usage.completion_tokens == 2
