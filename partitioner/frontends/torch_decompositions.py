"""Operators that are rewritten while a module is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {}
