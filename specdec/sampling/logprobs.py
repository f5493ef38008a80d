"""Log-probabilities of tokens under a model's raw law: before temperature, penalties, bias and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.messages import RowLogprobs
from specdec.sampling.transfer import index_of


def row_logprobs(
    logits: torch.Tensor, own_ids: Sequence[int], draft_ids: Sequence[int], num_top: int
) -> RowLogprobs:
    """Look tokens up in the log-softmax of rows.

    All values of a row come from one tensor, so the likeliest token has exactly the first of the top
    log-probabilities.

    Args:
        logits: [rows, vocab] raw logits without padding.
        own_ids: one token per row.
        draft_ids: one token for each of the first rows.
        num_top: k, how many of the likeliest tokens are wanted of each row; at most the vocabulary.
    """
    values = torch.log_softmax(logits.to(torch.float32), dim=-1)
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    return RowLogprobs(
        own=_looked_up(values, own_ids),
        draft=_looked_up(values[: len(draft_ids)], draft_ids),
        top_ids=top.indices.to(torch.int32).cpu().numpy(),
        top_logprobs=top.values.cpu().numpy(),
    )


def _looked_up(
    values: torch.Tensor, token_ids: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    ids = index_of(list(token_ids), values.device).unsqueeze(1)
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = values.gather(1, ids).squeeze(1).cpu().numpy()
    return found
