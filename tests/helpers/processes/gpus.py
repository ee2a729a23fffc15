"""A mark for tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
