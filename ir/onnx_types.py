"""ONNX's numbers of element types: data that front ends and backends share."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.errors import IRError
from partitioner.ir.types import ELEMENT_TYPES

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
