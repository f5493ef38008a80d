"""Loading a model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ModelUnavailable
from specdec.models.resolve import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model given by any name that `resolve_model` knows; 0.2 s and more.

    Raises:
        ModelUnavailable: the model or its tokenizer cannot be found or loaded.
    """
    path = resolve_model(name)
    if not has_tokenizer(path):
        # Asked first, because transformers may make up an empty tokenizer from config.json alone.
        raise ModelUnavailable(f"model {name!r} has no tokenizer: no tokenizer.json or the like in {path}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the tokenizers library raises plain Exception for a malformed file
        raise ModelUnavailable(f"cannot load the tokenizer of {name!r} from {path}: {error}") from error


def has_tokenizer(path: str) -> bool:
    """Return whether a resolved model comes with a tokenizer; a Hugging Face id is taken to."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / file).is_file() for file in _TOKENIZER_FILES)
