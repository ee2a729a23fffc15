"""PyTorch operators of our own, under ``torch.ops.partitioner``; importing registers them."""

from __future__ import annotations

import torch

#: Kept alive: PyTorch drops what a library registered when the library goes.
LIBRARY: torch.library.Library = torch.library.Library("partitioner", "DEF")  # type: ignore[no-untyped-call]
