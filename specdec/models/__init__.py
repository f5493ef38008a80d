"""Models by name: the embedded pair and its cache, tokenizers, and whether a draft fits a target.

Loads no weights except to convert the embedded models once; importing it imports neither torch nor
transformers.
"""

from specdec.models.embedded import EmbeddedStatus, is_embedded, list_embedded, pull
from specdec.models.pair import PairInfo, check_pair, model_info
from specdec.models.resolve import resolve_model
from specdec.models.tokenizer import load_tokenizer

__all__ = [
    "EmbeddedStatus",
    "PairInfo",
    "check_pair",
    "is_embedded",
    "list_embedded",
    "load_tokenizer",
    "model_info",
    "pull",
    "resolve_model",
]
