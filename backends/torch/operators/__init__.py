"""PyTorch operators of our own, under ``torch.ops.partitioner``; importing registers them."""

from partitioner.backends.torch.operators import (  # noqa: F401 - imported to be registered
    attention,
    bags,
    dropout,
    experts,
    normalization,
    spatial,
    vocabulary,
)
