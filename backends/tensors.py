"""Element types in torch, and tensors to and from NumPy without a copy where possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from partitioner.backends.errors import BackendError
from partitioner.ir.types import numpy_dtype

_TORCH: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bool": torch.bool,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "float8e4m3fn": torch.float8_e4m3fn,
        "float8e5m2": torch.float8_e5m2,
        "int16": torch.int16,
        "uint16": torch.uint16,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "int32": torch.int32,
        "uint32": torch.uint32,
        "float32": torch.float32,
        "int64": torch.int64,
        "uint64": torch.uint64,
        "float64": torch.float64,
        "complex64": torch.complex64,
        "complex128": torch.complex128,
    }
)

#: Element types that both gloo and NCCL reduce; others are
#: exchanged and combined elementwise.
REDUCIBLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)

_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
)


def combine(parts: Sequence[torch.Tensor], reduce: str) -> torch.Tensor:
    """Reduce parts elementwise, first to last.

    Raises:
        BackendError: The reduction is none of sum, prod, max, min.
    """
    if reduce not in _COMBINE:
        raise BackendError(f"reduction {reduce!r} is not one of {', '.join(_COMBINE)}")
    total = parts[0]
    for part in parts[1:]:
        total = _COMBINE[reduce](total, part)
    return total


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch type of an element type's name.

    Raises:
        BackendError: Packed 4-bit elements cannot cross a segment or a rank.
    """
    if dtype not in _TORCH:
        raise BackendError(f"tensors of {dtype} cannot be passed between segments or ranks")
    return _TORCH[dtype]


def dtype_word(dtype: torch.dtype) -> str:
    """An element type for people: ``float32``."""
    return str(dtype).removeprefix("torch.")


def from_numpy(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A CPU tensor on the array's memory (copied if read-only or not contiguous)."""
    kind = torch_dtype(dtype)
    dense = np.require(array, requirements=["C", "W"])
    if dense.nbytes == 0:
        return torch.empty(array.shape, dtype=kind)
    raw = torch.from_numpy(dense.reshape(-1).view(np.uint8))
    return raw.view(kind).reshape(array.shape)


def to_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """The tensor's elements (ml_dtypes for what NumPy lacks), on its memory if on the CPU."""
    dense = tensor.detach().cpu().contiguous()
    if dense.numel() == 0:
        return np.empty(tuple(dense.shape), numpy_dtype(dtype))
    # One element has any stride and is contiguous still; bytes want a stride of 1.
    line = dense.as_strided((dense.numel(),), (1,))
    raw: np.ndarray = line.view(torch.uint8).numpy()
    return raw.view(numpy_dtype(dtype)).reshape(tuple(dense.shape))
