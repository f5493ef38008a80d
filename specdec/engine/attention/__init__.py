"""Attention of a step's ragged batch over the paged KV cache, by the best kernel for the device.

- `cpu`: compiled loops for decoding, verification and prefill.
- `cuda`: FlashAttention with block tables, as torch ships it.
- `reference`: plain torch on any device and dtype, with every extra a model may ask for.
- `interface`: what plugs the above into a transformers model.
"""

from specdec.engine.attention.dispatch import attend
from specdec.engine.attention.traits import AttentionTraits

__all__ = ["AttentionTraits", "attend"]
