"""PyTorch operators of our own, under ``torch.ops.partitioner``; importing registers them."""

from partitioner.backends.torch.library import convolution, normalization, rms, upsampling

__all__ = ["convolution", "normalization", "rms", "upsampling"]
