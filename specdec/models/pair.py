"""Whether a draft can propose for a target, and what must be known of a model before it is served.

Reads configurations and tokenizers, never weights. Speculation compares token ids, so both models must mean
the same token by the same id: that is all that makes a pair compatible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import IncompatiblePair, ModelUnavailable
from specdec.models.resolve import resolve_model
from specdec.models.tokenizer import has_tokenizer, load_tokenizer
from specdec.types import ModelInfo

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names under which model families state how many positions they were built for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInfo:
    """What must be known of a compatible pair to serve it."""

    vocab_size: int
    """Ids that may be emitted: ``range(vocab_size)``, known to both. Embedding rows beyond are padding."""
    target_context: int
    """Tokens."""
    draft_context: int
    """Tokens."""
    eos_token_ids: frozenset[int]
    """The target's; any of them ends a sequence."""


def model_info(name: str) -> ModelInfo:
    """Describe a model that is to be served as a target, alone or with a draft.

    Raises:
        ModelUnavailable: it, its tokenizer or its context length cannot be found.
    """
    return _info(_open_target(name))


def check_pair(target: str, draft: str) -> PairInfo:
    """Check that the draft means the same tokens by the same ids as the target, and describe the pair.

    Tokenizers are compared token by token, added tokens included; chat templates, normalizers and merges
    are not, since only the target's tokenizer is ever used. Different padding of the two embeddings is fine.
    A local draft folder without a tokenizer is taken to share the target's if it has just as many embedding
    rows.

    Args:
        target: any name that `resolve_model` knows.
        draft: likewise.

    Raises:
        IncompatiblePair: naming both vocabulary sizes, or the first token that differs.
        ModelUnavailable: a model, the target's tokenizer or a context length cannot be found.
    """
    opened_target, opened_draft = _open_target(target), _open_draft(draft)
    info = _info(opened_target)
    if opened_draft.vocab is not None:
        _check_vocabs(target, draft, opened_target.vocab, opened_draft.vocab)
    else:
        _check_sizes(target, draft, opened_target.num_embeddings, opened_draft.num_embeddings)
    _check_draft_rows(draft, info.vocab_size, opened_draft.num_embeddings)
    return PairInfo(
        vocab_size=info.vocab_size,
        target_context=info.max_context,
        draft_context=_context(draft, opened_draft.config),
        eos_token_ids=info.eos_token_ids,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Opened:
    """A model's configuration (transformers' ``PretrainedConfig``), read once."""

    name: str
    config: Any

    @property
    def num_embeddings(self) -> int:
        return int(self.config.get_text_config().vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenedTarget(_Opened):
    vocab: Mapping[str, int]
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenedDraft(_Opened):
    vocab: Mapping[str, int] | None
    """None when its folder has no tokenizer."""


def _open_target(name: str) -> _OpenedTarget:
    path = resolve_model(name)
    config, tokenizer = _load_config(name, path), load_tokenizer(name)
    return _OpenedTarget(
        name=name,
        config=config,
        vocab=tokenizer.get_vocab(),
        eos_token_ids=frozenset(_eos_token_ids(path, config, tokenizer)),
    )


def _open_draft(name: str) -> _OpenedDraft:
    path = resolve_model(name)
    vocab = load_tokenizer(name).get_vocab() if has_tokenizer(path) else None
    return _OpenedDraft(name=name, config=_load_config(name, path), vocab=vocab)


def _info(target: _OpenedTarget) -> ModelInfo:
    num_known = max(target.vocab.values()) + 1
    return ModelInfo(
        vocab_size=min(num_known, target.num_embeddings),
        max_context=_context(target.name, target.config),
        eos_token_ids=target.eos_token_ids,
    )


def _check_vocabs(
    target: str, draft: str, target_vocab: Mapping[str, int], draft_vocab: Mapping[str, int]
) -> None:
    _check_sizes(target, draft, len(target_vocab), len(draft_vocab))
    differing = [token_id for _, token_id in target_vocab.items() ^ draft_vocab.items()]
    if differing:
        first = min(differing)
        raise IncompatiblePair(
            f"draft {draft!r} and target {target!r} do not share a vocabulary: token id {first} is "
            f"{_token(target_vocab, first)} to the target and {_token(draft_vocab, first)} to the draft "
            f"({len(set(differing))} ids differ); choose a draft with the target's tokenizer"
        )


def _check_sizes(target: str, draft: str, target_size: int, draft_size: int) -> None:
    if target_size != draft_size:
        raise IncompatiblePair(
            f"draft {draft!r} and target {target!r} do not share a vocabulary: the target has {target_size} "
            f"tokens, the draft {draft_size}; choose a draft with the target's tokenizer"
        )


def _check_draft_rows(draft: str, vocab_size: int, draft_rows: int) -> None:
    # The draft is fed whatever the target emits; an id it has no embedding for would crash it.
    if draft_rows < vocab_size:
        raise IncompatiblePair(
            f"draft {draft!r} has embeddings for {draft_rows} tokens, but the target may emit {vocab_size}"
        )


def _token(vocab: Mapping[str, int], token_id: int) -> str:
    return next((repr(token) for token, known_id in vocab.items() if known_id == token_id), "unknown")


def _load_config(name: str, path: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds, by file, network and model family
        raise ModelUnavailable(f"cannot load the configuration of model {name!r}: {error}") from error


def _context(name: str, config: Any) -> int:
    """Return the context length in tokens."""
    text_config = config.get_text_config()
    for key in _CONTEXT_KEYS:
        context = getattr(text_config, key, None)
        if context:
            return int(context)
    raise ModelUnavailable(f"model {name!r} does not state its context length ({', '.join(_CONTEXT_KEYS)})")


def _eos_token_ids(path: str, config: Any, tokenizer: Any) -> Iterator[int]:
    """Yield every EOS id that generation defaults, configuration or tokenizer state."""
    for holder in (_generation_config(path), config, config.get_text_config(), tokenizer):
        stated = getattr(holder, "eos_token_id", None)
        if isinstance(stated, int):
            yield stated
        elif stated is not None:
            yield from stated


def _generation_config(path: str) -> Any | None:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # it is optional
        return None
