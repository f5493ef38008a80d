"""What a decoder's forward multiplies with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from specdec.engine.attention import AttentionTraits
from specdec.kernels import as_array, dot_matmul, matmul, panels, tile_matmul, tiles

Activation = Literal["silu", "gelu_tanh"]


class Linear(Protocol):
    """A matrix that rows are multiplied with, and what is added to them."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out], contiguous and of one dtype."""
        ...

    def padded_rows(self, num_rows: int) -> int:
        """How many rows ``x`` should have if so many are wanted."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm."""

    weight: torch.Tensor
    """[hidden] float32."""
    eps: float
    array: npt.NDArray[np.float32] | None = field(init=False)
    """The weight's memory on a CPU: to ask a tensor for it costs a microsecond, and a step has hundreds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", _memory(self.weight))


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary position tables, halves paired."""

    cos: torch.Tensor
    """[positions, rotary_dim / 2] float32."""
    sin: torch.Tensor
    arrays: tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None] = field(init=False)
    """The memory of both on a CPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", (_memory(self.cos), _memory(self.sin)))


def _memory(tensor: torch.Tensor) -> npt.NDArray[np.float32] | None:
    return tensor.numpy() if tensor.device.type == "cpu" else None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """One decoder layer."""

    input_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rope: Rope
    traits: AttentionTraits
    out: Linear
    attention_out_norm: Norm | None
    """Of what attention adds (Gemma 2 and 3)."""
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    mlp_out_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """A whole model."""

    embed: torch.nn.Module
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    logit_softcap: float | None
    activation: Activation
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_rows: int
    """Width of a row of logits, padding included."""
    vocab_map: torch.Tensor | None
    """[rows of the head] int64: the ids it computes, if not all."""
    dtype: torch.dtype
    device: torch.device


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Hold a matrix [out, in] as its device multiplies fastest.

    On the CPU bfloat16 is laid out once, here, and not in every call: for a kernel of ours where the CPU has
    tiles, for another where it multiplies pairs, for oneDNN where it has other instructions for bfloat16, and
    for a third one of ours where it has none (docs/decisions/0011-cpu-kernels.md).
    """
    weight = weight.detach().contiguous()
    bias = None if bias is None else bias.detach()
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return TorchLinear(weight, bias)
    if tiles.IS_AVAILABLE and weight.shape[1] % tile_matmul.DEPTH == 0:
        return TileLinear(weight, bias)
    if dot_matmul.IS_AVAILABLE and weight.shape[1] % dot_matmul.DEPTH == 0:
        return DotLinear(weight, bias)
    return OneDnnLinear(weight, bias) if has_onednn_bfloat16() else PanelLinear(weight, bias)


def has_onednn_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TorchLinear:
    """Whatever torch makes of it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def padded_rows(self, num_rows: int) -> int:
        return padded_rows(num_rows)


class OneDnnLinear:
    """bfloat16 on CPUs with instructions for it: SmolLM2-135M's matmuls take a third of torch's time."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_TOKENS)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return result

    def padded_rows(self, num_rows: int) -> int:
        return padded_rows(num_rows)


class _OwnLinear:
    """A kernel of ours. A row's result is the same with any others beside it, and alone."""

    _num_outputs: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), self._num_outputs)
        self._multiply(as_array(x), as_array(out))
        return out

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def _multiply(self, x: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
        """Write the product with x to ``out``."""
        raise NotImplementedError


class TileLinear(_OwnLinear):
    """bfloat16 on CPUs with AMX."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs = len(weight)
        self._panels = panels.pack(weight, tile_matmul.DEPTH)
        self._bias = panels.pack_bias(bias, self._panels)

    def _multiply(self, x: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
        num_threads, configurations = numba.get_num_threads(), tile_matmul.CONFIGURATIONS
        tile_matmul.multiply(x, self._panels, self._bias, num_threads, configurations, out)


class DotLinear(_OwnLinear):
    """bfloat16 on CPUs with AVX512-BF16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs = len(weight)
        self._panels = panels.pack(weight, dot_matmul.DEPTH)
        self._bias = panels.pack_bias(bias, self._panels)

    def _multiply(self, x: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
        dot_matmul.multiply(x, self._panels, self._bias, numba.get_num_threads(), out)


class PanelLinear(_OwnLinear):
    """bfloat16 on every other CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs = len(weight)
        self._panels = matmul.pack(weight)
        self._bias = matmul.pack_bias(bias, len(weight))

    def _multiply(self, x: npt.NDArray[np.generic], out: npt.NDArray[np.generic]) -> None:
        matmul.multiply(x, self._panels, self._bias, numba.get_num_threads(), out)


_PACKED_FOR_TOKENS = 8
"""The batch oneDNN chooses the layout for; other sizes use it too."""


def padded_rows(num_rows: int) -> int:
    """Rows a matmul of a library gets for so many tokens: a few dozen different numbers in all.

    oneDNN keeps a program of some hundred kilobytes for every shape of a matmul it has seen. With every
    number of tokens a shape of its own, these grew to half a gigabyte. Two rows are the least: a single one
    is multiplied by another program, which rounds differently, and text would depend on how many tokens were
    verified at once.
    """
    num_rows = max(2, num_rows)
    step = 1 if num_rows <= 16 else 4 if num_rows <= 64 else 16 if num_rows <= 256 else 64
    return -(-num_rows // step) * step
