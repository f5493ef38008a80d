"""Making ordinary Hugging Face folders: target from GGUF file, draft from its layers and the target.

The only module here that loads weights. torch and transformers are imported inside the functions: whoever
finds the models ready should not wait seconds for an import.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.models.catalog import DRAFT_DATA_FILES, DRAFT_LAYERS_FILE

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WEIGHTS_FILE = "model.safetensors"

TARGET_CONTEXT = 8192
"""Tokens; what SmolLM2 was trained for."""
EOS_TOKEN_ID = 2
"""``<|im_end|>``: SmolLM2 ends its turns and its texts with it."""
BOS_TOKEN_ID = 1
PAD_TOKEN_ID = 2

_COPIED_TO_DRAFT = tuple(name for name in DRAFT_DATA_FILES if name != DRAFT_LAYERS_FILE)
_SHARED_WITH_DRAFT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def convert_target(gguf: Path, folder: Path) -> None:
    """Write SmolLM2's bfloat16 weights and configuration to ``folder`` from its GGUF file; about 15 s.

    Quantised blocks are expanded in float32 and rounded to bfloat16 once.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _save_weights({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}, folder)
    _save_config(model.config, folder)


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's tokenizer and chat template to ``folder``."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The file says `tokenizer.ggml.pre = smollm`: split off every digit, then as GPT-2. transformers
        # takes every GPT-2 vocabulary for GPT-2's own and leaves the digits out ("\n\n1" would differ).
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
        tokenizer.save_pretrained(folder)
    _edit_json(
        folder / "tokenizer_config.json",
        remove=("is_local", "local_files_only", "name_or_path"),
        update={"model_max_length": TARGET_CONTEXT, "clean_up_tokenization_spaces": False},
    )


def assemble_draft(data: Path, target: Path, folder: Path) -> None:
    """Write the draft to ``folder``: its layers from ``data``, embedding and tokenizer from ``target``.

    Args:
        data: holds ``layers.safetensors`` and files to be copied as they are.
        target: the converted target. Its embedding [vocab, hidden] is taken over bit for bit; the head is
            tied to it.
        folder: empty; becomes an ordinary causal LM folder.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    weights = load_file(data / DRAFT_LAYERS_FILE)
    with safe_open(target / WEIGHTS_FILE, framework="pt") as target_weights:
        weights[EMBEDDING] = target_weights.get_tensor(EMBEDDING)
    _save_weights(weights, folder)
    for name in _COPIED_TO_DRAFT:
        shutil.copyfile(data / name, folder / name)
    for name in _SHARED_WITH_DRAFT:
        shutil.copyfile(target / name, folder / name)


def _save_weights(weights: dict[str, Any], folder: Path) -> None:
    """Save all but the head, which is tied to the embedding.

    Not `save_pretrained`: it refuses a model that came from a GGUF file, although its weights are plain now.
    """
    from safetensors.torch import save_file

    plain = {name: tensor.contiguous() for name, tensor in weights.items() if name != HEAD}
    save_file(plain, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _save_config(config: Any, folder: Path) -> None:
    """Save configuration and generation defaults, without the traces of the GGUF file."""
    from transformers import GenerationConfig

    config.save_pretrained(folder)
    _edit_json(
        folder / "config.json",
        remove=("quantization_config", "_name_or_path", "_model_name_or_path"),
        update={"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]},
    )
    GenerationConfig(
        bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID, pad_token_id=PAD_TOKEN_ID
    ).save_pretrained(folder)


def _edit_json(path: Path, *, remove: tuple[str, ...], update: dict[str, object]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in values.items() if key not in remove}
    path.write_text(json.dumps({**kept, **update}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars inside the block.

    Its GGUF reader has a bar of its own that the library's switch does not reach, hence the patch.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    own_bar = getattr(gguf_reader, "tqdm", None)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf_reader.tqdm = _no_bar
    try:
        yield
    finally:
        gguf_reader.tqdm = own_bar
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _no_bar(items: Any, *args: object, **kwargs: object) -> Any:
    return items
