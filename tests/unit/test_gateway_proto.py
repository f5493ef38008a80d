"""The committed gRPC stubs are what the contract generates."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from specdec.gateway.proto import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]


def load_generator():
    pytest.importorskip("grpc_tools", reason="the dev extra has the protobuf compiler")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_stubs_equal_generated_ones(tmp_path):
    generator = load_generator()
    generator.generate(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(generator.STUB_NAMES)
    for name in generator.STUB_NAMES:
        committed = (generator.STUB_FOLDER / name).read_text(encoding="utf-8")
        assert committed == (tmp_path / name).read_text(encoding="utf-8"), f"{name}: run protos/generate.py"
        assert committed.startswith(generator.GENERATED_MARK)


def test_contract_has_its_public_names():
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert service.full_name == "specdec.v1.GenerationService"
    names = ["Generate", "GenerateStream", "GetModelInfo", "ListModels", "Tokenize", "Detokenize"]
    assert [method.name for method in service.methods] == names
    assert generation_pb2_grpc.GenerationServiceStub


def test_unset_sampling_fields_are_told_from_zero():
    options = generation_pb2.SamplingOptions(temperature=0.0)
    assert options.HasField("temperature")
    assert not options.HasField("top_p")


def test_go_stubs_are_generated_from_the_same_contract(tmp_path):
    """The plugins are Debian's ``protoc-gen-go`` and ``protoc-gen-go-grpc``, or ``go install``'s."""
    tools = ("protoc-gen-go", "protoc-gen-go-grpc", "gofmt")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    protoc = pytest.importorskip("grpc_tools.protoc", reason="the dev extra has the protobuf compiler")
    package = "specdec/v1/generation.proto=example.com/specdec/v1;specdecv1"
    options = [
        option
        for kind in ("go", "go-grpc")
        for option in (
            f"--{kind}_out={tmp_path}",
            f"--{kind}_opt=M{package}",
            f"--{kind}_opt=paths=source_relative",
        )
    ]
    assert protoc.main(["protoc", f"-I{ROOT / 'protos'}", *options, "specdec/v1/generation.proto"]) == 0
    folder = tmp_path / "specdec" / "v1"
    stubs = [folder / "generation.pb.go", folder / "generation_grpc.pb.go"]
    # A parse error is told on stderr and by the status.
    subprocess.run(["gofmt", "-e", "-l", *stubs], check=True, capture_output=True, text=True)
    messages, service = (stub.read_text(encoding="utf-8") for stub in stubs)
    for message in generation_pb2.DESCRIPTOR.message_types_by_name:
        assert f"type {message} struct {{" in messages
    for method in generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods:
        assert f"{method.name}(ctx context.Context" in service
