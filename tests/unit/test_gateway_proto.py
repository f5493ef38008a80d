"""The committed gRPC stubs are what the contract generates."""

from __future__ import annotations

import importlib.util
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
    names = ["Generate", "GenerateStream", "GetModelInfo", "Tokenize", "Detokenize"]
    assert [method.name for method in service.methods] == names
    assert generation_pb2_grpc.GenerationServiceStub


def test_unset_sampling_fields_are_told_from_zero():
    options = generation_pb2.SamplingOptions(temperature=0.0)
    assert options.HasField("temperature")
    assert not options.HasField("top_p")
