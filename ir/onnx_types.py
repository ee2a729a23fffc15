"""ONNX's numbers of element types: data that front ends and backends share."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.errors import IRError

#: `onnx.TensorProto.DataType` number of each element type of `ir.types.DTYPE_BITS`.
ONNX_DTYPES: Mapping[str, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "complex64": 14,
    "complex128": 15,
    "bfloat16": 16,
    "float8e4m3fn": 17,
    "float8e5m2": 19,
    "uint4": 21,
    "int4": 22,
}

_NAMES: Mapping[int, str] = {number: name for name, number in ONNX_DTYPES.items()}


def onnx_dtype(dtype: str) -> int:
    """Number of an element type in ONNX.

    Raises:
        IRError: The name is no element type.
    """
    if dtype not in ONNX_DTYPES:
        raise IRError(f"element type {dtype!r} is not one of {', '.join(ONNX_DTYPES)}")
    return ONNX_DTYPES[dtype]


def from_onnx_dtype(number: int) -> str:
    """Name of an element type from its number in ONNX.

    Raises:
        IRError: The number is unknown, or of elements that the IR has no type for (strings, ...).
    """
    if number not in _NAMES:
        raise IRError(f"ONNX element type {number} is not one of {sorted(_NAMES)}")
    return _NAMES[number]
