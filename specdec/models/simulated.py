"""What a client sees of simulated models: words in place of text, a context length, no end of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.types import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def simulated_info(vocab_size: int, max_context: int) -> ModelInfo:
    """A model that never ends by itself."""
    return ModelInfo(vocab_size=vocab_size, max_context=max_context, eos_token_ids=frozenset())


def simulated_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """Token ``i`` is the word ``wi``; every other word is token 0."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
