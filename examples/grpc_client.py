"""The gRPC stubs that come with specdec: a stream with a deadline, and what an error tells."""

import os

import grpc

from specdec.gateway.proto import generation_pb2 as pb
from specdec.gateway.proto import generation_pb2_grpc as pb_grpc

stub = pb_grpc.GenerationServiceStub(grpc.insecure_channel(os.environ.get("SPECDEC_GRPC", "127.0.0.1:9000")))
metadata = (("authorization", f"Bearer {os.environ.get('SPECDEC_API_KEY', 'none')}"),)
question = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])

request = pb.GenerateRequest(
    messages=question,
    sampling=pb.SamplingOptions(max_tokens=40, seed=7),
    speculative=pb.SpeculativeOptions(metrics=True),
)
for message in stub.GenerateStream(request, timeout=60, metadata=metadata):
    print(message.text, end="", flush=True)
print("\n", message.usage, message.speculative_metrics)

try:
    stub.Generate(
        pb.GenerateRequest(sampling=pb.SamplingOptions(max_tokens=40)), timeout=60, metadata=metadata
    )
except grpc.RpcError as error:
    print(error.code().name, error.details(), dict(error.trailing_metadata())["specdec-error-param"])
