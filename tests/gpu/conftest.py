"""Tests that need a CUDA device; elsewhere they are skipped."""

import pytest
import torch

from specdec.engine.decoder.forward import Decoder
from specdec.engine.loading import load_forward
from tests.tiny_models import reference_model, tiny_config

MAX_CONTEXT = 1024
CUDA = torch.device("cuda:0")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request):
    return request.param


@pytest.fixture(params=["llama", "mistral", "qwen3", "gemma3_text"])
def decoder(request, dtype, tmp_path):
    """Tiny, but with shapes that FlashAttention takes; grouped heads; two of them with windows."""
    config = tiny_config(
        request.param,
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
        initializer_range=0.06,
        max_position_embeddings=MAX_CONTEXT,
    )
    reference_model(config).save_pretrained(tmp_path)
    forward = load_forward(str(tmp_path), dtype, CUDA, max_context=MAX_CONTEXT)
    assert isinstance(forward, Decoder)
    return forward
