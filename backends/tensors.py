"""Element types in torch, and tensors to and from NumPy without a copy where possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from partitioner.backends.errors import BackendError
from partitioner.ir.types import DTYPE_BITS, numpy_dtype

#: torch's types by our names, which differ in the underscore of ``float8_e5m2`` only. Packed 4-bit
#: elements have none.
_TORCH: Mapping[str, torch.dtype] = MappingProxyType(
    {
        dtype: getattr(torch, dtype.replace("float8", "float8_"))
        for dtype, bits in DTYPE_BITS.items()
        if bits >= 8
    }
)

#: Element types that both gloo and NCCL reduce; others are exchanged and combined elementwise.
REDUCIBLE = frozenset(
    _TORCH[dtype]
    for dtype in (
        *("float16", "bfloat16", "float32", "float64"),
        *("int8", "uint8", "int32", "int64"),
    )
)

_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
)


def combine(parts: Sequence[torch.Tensor], reduce: str) -> torch.Tensor:
    """Reduce parts elementwise, first to last, by sum, prod, max or min."""
    if reduce not in _COMBINE:
        raise BackendError(f"reduction {reduce!r} is not one of {', '.join(_COMBINE)}")
    total = parts[0]
    for part in parts[1:]:
        total = _COMBINE[reduce](total, part)
    return total


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as bytes."""
    return tensor.view(-1).view(torch.uint8)


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch type of an element type's name; packed 4-bit elements are refused."""
    if dtype not in _TORCH:
        raise BackendError(f"tensors of {dtype} cannot be passed between segments or ranks")
    return _TORCH[dtype]


def dtype_word(dtype: torch.dtype) -> str:
    """An element type for people: ``float32``."""
    return str(dtype).removeprefix("torch.")


def from_numpy(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A CPU tensor on the array's memory (copied if read-only or not contiguous)."""
    dense = np.require(array, requirements=["C", "W"])
    if dense.nbytes == 0:
        return torch.empty(array.shape, dtype=torch_dtype(dtype))
    raw = torch.from_numpy(dense.reshape(-1).view(np.uint8))
    return raw.view(torch_dtype(dtype)).reshape(array.shape)


def to_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """The tensor's elements (ml_dtypes for what NumPy lacks), on its memory if on the CPU."""
    dense = tensor.detach().cpu().contiguous()
    if dense.numel() == 0:
        return np.empty(tuple(dense.shape), numpy_dtype(dtype))
    # One element has any stride and is contiguous still; bytes want a stride of 1.
    line = dense.as_strided((dense.numel(),), (1,))
    raw: np.ndarray = line.view(torch.uint8).numpy()
    return raw.view(numpy_dtype(dtype)).reshape(tuple(dense.shape))
