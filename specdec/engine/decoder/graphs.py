"""CUDA graphs of the fast path: the small batches of drafting and verification, launched as one.

A decoding step of a small batch is some hundred kernels of a few microseconds each: launching them one by
one from Python takes longer than they run. A graph launches them at once, but is fixed to shapes and
addresses. So a batch is padded to one of few shapes (`Bucket`) and copied to tensors that never move.

Padding tokens belong to sequences that do not exist; their keys and values go to the cache's scratch block.
What comes out for them is never looked at, and no other token attends to them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from specdec.engine.attention import cuda
from specdec.engine.batch import BatchTensors, StepBatch
from specdec.engine.decoder.forward import Decoder
from specdec.engine.kv_cache import PagedKVCache
from specdec.engine.upload import pack, unpack

NUM_SEGMENTS = (1, 2, 4, 8, 16, 32)
TOKENS_PER_SEGMENT = (1, 2, 3, 5, 9)
"""A draft's single tokens, and verification of up to 8 drafted ones."""
MAX_GRAPHS = 96
"""Shapes met when there are that many graphs run without one."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on tensors that stay where they are, and returns what repeats it."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A shape that batches are padded to."""

    num_segments: int
    tokens_per_segment: int
    """At most; the packed tokens are `num_tokens` together."""
    table_width: int
    """Blocks of a sequence, at most."""

    @property
    def num_tokens(self) -> int:
        return self.num_segments * self.tokens_per_segment


class Buckets:
    """The shapes there are.

    Args:
        max_blocks: of one sequence.
        has_block_tables: whether attention reads the cache through block tables. It has to copy whole tables'
            worth of blocks otherwise, so that their width matters.
    """

    def __init__(self, max_blocks: int, *, has_block_tables: bool) -> None:
        powers = [2**i for i in range(max_blocks.bit_length()) if 2**i < max_blocks]
        self.table_widths = (max_blocks,) if has_block_tables else (*powers, max_blocks)

    def narrowest(self) -> list[Bucket]:
        """Those of the narrowest tables, the largest first."""
        width = self.table_widths[0]
        return sorted((Bucket(n, t, width) for n in NUM_SEGMENTS for t in TOKENS_PER_SEGMENT), reverse=True)

    def of(self, batch: StepBatch) -> Bucket | None:
        """The smallest that holds a batch, if any does."""
        num_segments = _at_least(len(batch.segments), NUM_SEGMENTS)
        tokens_per_segment = _at_least(batch.max_queries, TOKENS_PER_SEGMENT)
        width = _at_least(batch.tables.shape[1], self.table_widths)
        if num_segments is None or tokens_per_segment is None or width is None:
            return None
        return Bucket(num_segments, tokens_per_segment, width)


def _at_least(number: int, sizes: Sequence[int]) -> int | None:
    place = bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None


def padded(batch: StepBatch, bucket: Bucket, scratch_block: int) -> StepBatch:
    """A batch with padding behind its tokens, segments and rows, as large as the bucket says.

    Padding tokens are dealt out to padding segments as far as these hold them; a batch of single tokens has
    no others. The rest belongs to no segment: attention leaves its output as it finds it.
    """
    size, num_tokens, num_segments = batch.block_size, len(batch.token_ids), len(batch.segments)
    num_missing = bucket.num_tokens - num_tokens
    places = np.arange(num_missing) % bucket.tokens_per_segment
    extra = np.arange(bucket.num_segments - num_segments)
    lengths = np.clip(
        num_missing - extra * bucket.tokens_per_segment, 0, bucket.tokens_per_segment, dtype=np.int64
    )
    starts = num_tokens + np.cumsum(lengths) - lengths
    tables = np.zeros((bucket.num_segments, bucket.table_width), np.int32)
    tables[:num_segments, : batch.tables.shape[1]] = batch.tables
    tables[num_segments:, 0] = scratch_block
    padding = np.stack([num_segments + extra, starts, lengths, lengths], axis=1)
    return replace(
        batch,
        token_ids=np.concatenate([batch.token_ids, np.zeros(num_missing, np.int64)]),
        positions=np.concatenate([batch.positions, places]),
        slots=np.concatenate([batch.slots, scratch_block * size + places]),
        rows=np.concatenate([batch.rows, np.zeros(bucket.num_tokens - len(batch.rows), np.int64)]),
        segments=np.concatenate([batch.segments, padding]),
        tables=tables,
        device_token_ids=None,
    )


class GraphedDecoder:
    """See `specdec.engine.model_runner.Forward`: a decoder that launches small batches as graphs.

    Logits of one forward are overwritten by the next.

    Args:
        decoder: runs whatever fits no bucket.
        cache: the one it will be used with; graphs hold its addresses.
        max_context: positions of a sequence.
        capture: makes the graphs; another one is for tests.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedKVCache, max_context: int, capture: Capture | None = None
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._capture = capture or CudaCapture(decoder.device)
        self._buckets = Buckets(-(-max_context // cache.block_size), has_block_tables=cuda.HAS_BLOCK_TABLES)
        self._graphs: dict[Bucket, _Graph] = {}
        self._logits: torch.Tensor | None = None

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Whether nothing in a forward waits for the device."""
        weights = decoder.weights
        return weights.device.type == "cuda" and all(
            cuda.can_attend(weights.dtype, weights.head_dim, weights.head_dim, layer.traits)
            for layer in weights.layers
        )

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what most batches need; the largest first, so that the others fit into its memory."""
        for bucket in self._buckets.narrowest():
            self._graph(bucket)

    def forward(self, batch: StepBatch, cache: PagedKVCache) -> torch.Tensor:
        """See `Decoder.forward`."""
        bucket = self._buckets.of(batch)
        graph = None if bucket is None or cache is not self._cache else self._graph(bucket)
        return self._decoder.forward(batch, cache) if graph is None else graph.run(batch)

    def _graph(self, bucket: Bucket) -> _Graph | None:
        graph = self._graphs.get(bucket)
        if graph is None and len(self._graphs) < MAX_GRAPHS:
            out = self._room_for_logits(bucket.num_tokens)
            graph = self._graphs[bucket] = _Graph(self._decoder, self._cache, bucket, out, self._capture)
        return graph

    def _room_for_logits(self, num_rows: int) -> torch.Tensor:
        """[num_rows, vocab_rows] shared by all graphs, so that each need not keep its own."""
        if self._logits is None:
            weights = self._decoder.weights
            largest = NUM_SEGMENTS[-1] * TOKENS_PER_SEGMENT[-1]
            self._logits = torch.empty(
                largest, weights.vocab_rows, dtype=weights.dtype, device=weights.device
            )
        return self._logits[:num_rows]


class _Graph:
    """One shape's forward."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        bucket: Bucket,
        out: torch.Tensor,
        capture: Capture,
    ) -> None:
        self._bucket = bucket
        self._scratch_block = cache.scratch_block
        self._out = out
        nothing = padded(
            StepBatch.of([], [], [], cache.block_size, decoder.device), bucket, cache.scratch_block
        )
        self._static = pack(nothing.arrays, decoder.device).to(decoder.device)
        self._tensors = BatchTensors.of(
            unpack(self._static, nothing.arrays),
            max_queries=bucket.tokens_per_segment,
            max_kv_length=bucket.table_width * cache.block_size,
            block_size=cache.block_size,
        )
        batch = replace(nothing, static_tensors=self._tensors)

        def work() -> None:
            out.copy_(decoder.forward(batch, cache))

        self._replay = capture(work)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """[rows of the batch, vocab_rows] logits."""
        arrays = padded(batch, self._bucket, self._scratch_block).arrays
        self._static.copy_(pack(arrays, batch.device), non_blocking=True)
        if batch.device_token_ids is not None:
            self._tensors.token_ids[: len(batch.token_ids)].copy_(batch.device_token_ids)
        self._replay()
        return self._out[: len(batch.rows)]


class CudaCapture:
    """A `Capture` on a CUDA device; all graphs share one pool of memory, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            self._warm_up(work)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: another model's worker, say.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
            self._pool = graph.pool()
        return graph.replay

    def _warm_up(self, work: Callable[[], None]) -> None:
        """Libraries choose kernels and claim memory in their first call, which cannot be captured."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
