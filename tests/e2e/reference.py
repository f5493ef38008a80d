"""The target by transformers alone, in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from specdec.models import load_tokenizer, resolve_model


@functools.cache
def reference_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.float32)


def prompt_tokens(prompt: str) -> list[int]:
    """What a chat with this one message begins with."""
    messages = [{"role": "user", "content": prompt}]
    tokenizer = load_tokenizer("smollm2")
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def logprobs_behind(token_ids: Sequence[int]) -> torch.Tensor:
    """Log-softmax of the raw logits behind each token; [tokens, vocabulary]."""
    with torch.inference_mode():
        logits = reference_model()(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
