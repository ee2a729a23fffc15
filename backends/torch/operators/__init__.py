"""PyTorch operators of our own, under ``torch.ops.partitioner``; importing registers them."""

from partitioner.backends.torch.operators import (
    attention,
    convolution,
    dropout,
    normalization,
    rms,
    upsampling,
    vocabulary,
)

__all__ = [
    "attention",
    "convolution",
    "dropout",
    "normalization",
    "rms",
    "upsampling",
    "vocabulary",
]
