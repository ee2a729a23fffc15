"""PyTorch operators of our own, under ``torch.ops.partitioner``; importing registers them."""

from partitioner.backends.torch.library import attention, dropout, vocabulary
from partitioner.backends.torch.library.registry import LIBRARY

__all__ = ["LIBRARY", "attention", "dropout", "vocabulary"]
