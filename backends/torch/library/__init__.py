"""PyTorch operators of our own, under ``torch.ops.partitioner``; importing registers them."""

from partitioner.backends.torch.library import attention, dropout, vocabulary

__all__ = ["attention", "dropout", "vocabulary"]
