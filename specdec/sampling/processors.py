"""From logits to the law a client asked for.

Order: exclusions (bad words, early ends, grammar), repetition, frequency and presence penalties, logit bias,
temperature, top-k, top-p, min-p. The same code runs on target rows (which alone makes the output law right)
and on draft rows (which keeps acceptance high). Every row has its own parameters and its own history, the
draft prefix of that row included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.sampling.exclusion import exclude, may_exclude
from specdec.sampling.rows import RowContext
from specdec.sampling.transfer import index_of, to_device
from specdec.types import SamplingParams, VerificationMode


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Float32 (or float64) logits with the padded ids cut off: [rows, vocab_size].

    Args:
        logits: [rows, >= vocab_size], any floating dtype.
        vocab_size: ids the tokenizer knows.
    """
    kept = logits[:, :vocab_size]
    return kept if kept.dtype == torch.float64 else kept.to(torch.float32)


def process_logits(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    """Apply every processor but the truncating ones' softmax: the result's softmax is the law.

    Args:
        logits: [rows, vocab] float32 or float64, not modified.
        rows: one context per row, or none if all are plain (`is_plain`). Greedy rows get exclusions,
            penalties and bias only; their law is the argmax.

    Returns:
        [rows, vocab], same dtype; excluded tokens are ``-inf``, at least one per row is not. Tokens that tie
        with the last one top-k keeps are kept too.
    """
    logits = _apply_penalties(exclude(logits, rows), rows)
    logits = _apply_bias(logits, rows)
    logits = _apply_temperature(logits, rows)
    logits = _apply_top_k(logits, rows)
    logits = _apply_top_p(logits, rows)
    return _apply_min_p(logits, rows)


_PLAIN = SamplingParams(mode=VerificationMode.GREEDY)


def is_plain(params: SamplingParams) -> bool:
    """Whether a token is the likeliest one by the raw logits, whatever is in front of it."""
    # Fields that a greedy law does not know of; whatever else there is counts.
    temperature = _PLAIN.temperature
    return replace(params, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=0) == _PLAIN


def target_law(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    """The processed law itself: [rows, vocab] probabilities, each row sums to 1."""
    return torch.softmax(process_logits(logits, rows), dim=-1)


def _apply_penalties(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    penalised = [i for i, row in enumerate(rows) if _is_penalised(row.params)]
    if not penalised:
        return logits
    logits = logits.clone()
    for i in penalised:
        _penalise_row(logits[i], rows[i])
    return logits


def depends_on_history(params: SamplingParams) -> bool:
    """Whether a row's law is changed by the tokens before it, beyond what the model makes of them."""
    return _is_penalised(params) or may_exclude(params)


def _is_penalised(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
    )


def _penalise_row(row_logits: torch.Tensor, row: RowContext) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        # Keskar et al. 2019, arXiv:1909.05858: prompt and output tokens alike.
        seen = index_of(sorted(set(row.token_ids[: row.length])), row_logits.device)
        values = row_logits[seen]
        # A factor near 0 may reach the largest float, but not infinity, which softmax would turn into NaN.
        limits = torch.finfo(row_logits.dtype)
        factor = max(params.repetition_penalty, limits.tiny)
        row_logits[seen] = torch.where(values > 0, values / factor, values * factor).clamp_max(limits.max)
    output_counts = Counter(row.token_ids[row.prompt_len : row.length])
    if output_counts and (params.frequency_penalty or params.presence_penalty):
        ids = index_of(list(output_counts), row_logits.device)
        counts = to_device(
            torch.tensor(list(output_counts.values()), dtype=row_logits.dtype), row_logits.device
        )
        row_logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _apply_bias(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    cells = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias]
    if not cells:
        return logits
    row_idx, token_idx, bias = zip(*cells, strict=True)
    values = to_device(torch.tensor(bias, dtype=logits.dtype), logits.device)
    return logits.index_put(
        (index_of(row_idx, logits.device), index_of(token_idx, logits.device)), values, accumulate=True
    )


def _column(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=logits.dtype), logits.device).unsqueeze(1)


def _apply_temperature(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    temperatures = [1.0 if row.params.is_greedy else row.params.temperature for row in rows]
    if all(temperature == 1.0 for temperature in temperatures):
        return logits
    scale = _column(temperatures, logits).clamp_min(torch.finfo(logits.dtype).tiny)
    # The maximum goes first, so that dividing by a tiny temperature can reach -inf but never inf - inf. Rows
    # of temperature 1 stay as they are: rounding creates ties, which must not depend on a row's neighbours.
    best = logits.max(dim=-1, keepdim=True).values.masked_fill(scale == 1.0, 0.0)
    return (logits - best) / scale


def _apply_top_k(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    wanted = {
        i: row.params.top_k
        for i, row in enumerate(rows)
        if 0 < row.params.top_k < vocab_size and not row.params.is_greedy
    }
    if not wanted:
        return logits
    idx = index_of(list(wanted), logits.device)
    ks = index_of(list(wanted.values()), logits.device)
    selected = logits[idx]
    best = selected.topk(max(wanted.values()), dim=-1).values
    threshold = best.gather(1, (ks - 1).unsqueeze(1))
    return logits.index_copy(0, idx, selected.masked_fill(selected < threshold, -torch.inf))


def _apply_top_p(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    wanted = {
        i: row.params.top_p
        for i, row in enumerate(rows)
        if row.params.top_p < 1.0 and not row.params.is_greedy
    }
    if not wanted:
        return logits
    idx = index_of(list(wanted), logits.device)
    selected = logits[idx]
    probs, order = torch.softmax(selected, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs
    # A token stays while the mass before it is short of top_p; the first always does.
    dropped = before >= _column(list(wanted.values()), logits)
    dropped[:, 0] = False
    mask = torch.zeros_like(dropped).scatter(1, order, dropped)
    return logits.index_copy(0, idx, selected.masked_fill(mask, -torch.inf))


def _apply_min_p(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    if all(row.params.min_p == 0.0 or row.params.is_greedy for row in rows):
        return logits
    fractions = _column([0.0 if row.params.is_greedy else row.params.min_p for row in rows], logits)
    floor = logits.max(dim=-1, keepdim=True).values + fractions.log()
    return logits.masked_fill(logits < floor, -torch.inf)
