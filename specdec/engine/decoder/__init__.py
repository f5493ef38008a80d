"""The fast path: a lean forward for the common decoder families, over weights packed for the device.

- `families`: reads the weights out of a transformers model.
- `weights`: how they are held: fused projections, packed matrices, rotary tables.
- `forward`: the layers, once, for every device.
- `graphs`: small batches as CUDA graphs.
- `cpu_step`, `torch_step`: the small operations between the matmuls.
"""
