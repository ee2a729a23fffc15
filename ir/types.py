"""Element types with their numbers in ONNX, which front ends and backends share; tensor types.

Shapes are static, each dim with its symbol if it had one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from partitioner.ir.errors import IRError

#: Bits an element, and number in ONNX (`TensorProto.DataType`), of each element type; the names are
#: those that ONNX and NumPy share.
ELEMENT_TYPES: Mapping[str, tuple[int, int]] = {
    "bool": (8, 9),
    "int4": (4, 22),
    "uint4": (4, 21),
    "int8": (8, 3),
    "uint8": (8, 2),
    "float8e4m3fn": (8, 17),
    "float8e5m2": (8, 19),
    "int16": (16, 5),
    "uint16": (16, 4),
    "float16": (16, 10),
    "bfloat16": (16, 16),
    "int32": (32, 6),
    "uint32": (32, 12),
    "float32": (32, 1),
    "int64": (64, 7),
    "uint64": (64, 13),
    "float64": (64, 11),
    "complex64": (64, 14),
    "complex128": (128, 15),
}
DTYPE_BITS = {name: bits for name, (bits, _) in ELEMENT_TYPES.items()}

_ML_DTYPES: dict[str, type[np.generic]] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy type of an element type's name (of `ml_dtypes` for the small ones)."""
    return np.dtype(_ML_DTYPES.get(dtype, dtype))


def item_bytes(dtype: str) -> float:
    """Bytes of one element; half a byte for 4-bit types."""
    return DTYPE_BITS[dtype] / 8


def dense_bytes(numel: int, dtype: str) -> int:
    """Bytes of a dense tensor (4-bit elements are packed in pairs)."""
    return (numel * DTYPE_BITS[dtype] + 7) // 8


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a tensor: the size that planning uses, and the symbol that was bound to it."""

    size: int
    symbol: str | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise IRError(f"dim size is {self.size}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and dims of a tensor."""

    dtype: str
    dims: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise IRError(f"element type {self.dtype!r} is not one of {', '.join(DTYPE_BITS)}")

    @classmethod
    def of(cls, dtype: str, shape: Iterable[int]) -> TensorType:
        """A type with plain sizes: ``TensorType.of("float32", (2, 3))``."""
        return cls(dtype, tuple(Dim(size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""
        return tuple(dim.size for dim in self.dims)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return dense_bytes(self.numel, self.dtype)

    def with_shape(self, shape: Iterable[int]) -> TensorType:
        """The same element type with another (local) shape; sizes that stay keep their symbol."""
        dims = tuple(Dim(size) for size in shape)
        if len(dims) == len(self.dims):
            pairs = zip(self.dims, dims, strict=True)
            dims = tuple(old if old.size == new.size else new for old, new in pairs)
        return TensorType(self.dtype, dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


#: Name of each element type, by number.
_NAMES: Mapping[int, str] = dict(
    sorted((number, name) for name, (_, number) in ELEMENT_TYPES.items())
)
#: Number of each element type, by name.
ONNX_DTYPES: Mapping[str, int] = {name: number for number, name in _NAMES.items()}


def onnx_dtype(dtype: str) -> int:
    """Number of an element type in ONNX; IRError if the name is no element type."""
    if dtype not in ONNX_DTYPES:
        raise IRError(f"element type {dtype!r} is not one of {', '.join(ONNX_DTYPES)}")
    return ONNX_DTYPES[dtype]


def from_onnx_dtype(number: int) -> str:
    """Name of an element type from its number in ONNX; IRError for others (strings, ...)."""
    if number not in _NAMES:
        raise IRError(f"ONNX element type {number} is not one of {sorted(_NAMES)}")
    return _NAMES[number]
