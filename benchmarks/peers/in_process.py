"""transformers' ``generate`` behind standard input and output, one JSON object a line.

Runs in its own environment, hence nothing of specdec is imported here.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(folder: str, dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    # Every answer has the same number of tokens; sampling is what the request says, not the model's folder.
    config = model.generation_config
    config.eos_token_id = None
    config.pad_token_id = 0
    config.temperature = config.top_p = 1.0
    config.top_k = 0
    return model


def pad_left(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(ids)) + ids for ids in prompts]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def answer(target: Any, draft: Any, request: dict[str, Any]) -> dict[str, float]:
    assisted = {"assistant_model": draft} if request["is_assisted"] else {}
    inputs = pad_left(request["prompts"])
    started_s = time.perf_counter()
    with torch.inference_mode():
        ids = target.generate(**inputs, max_new_tokens=request["max_tokens"], do_sample=False, **assisted)
    elapsed_s = time.perf_counter() - started_s
    num_tokens = (ids.shape[1] - inputs["input_ids"].shape[1]) * ids.shape[0]
    return {"tokens_per_s": num_tokens / elapsed_s, "num_tokens": num_tokens}


def main() -> None:
    target_folder, draft_folder, dtype, gamma = sys.argv[1:]
    target, draft = load(target_folder, dtype), load(draft_folder, dtype)
    draft.generation_config.num_assistant_tokens = int(gamma)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(target, draft, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
