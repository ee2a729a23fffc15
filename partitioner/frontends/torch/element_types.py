"""Names in the IR of PyTorch's element types."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partitioner.backends.tensors import torch_dtype
from partitioner.frontends.errors import FrontendError

#: Names in the IR of the element types that traces may have.
DTYPES: Mapping[torch.dtype, str] = {
    torch_dtype(name): name
    for name in (
        *("bool", "int8", "uint8", "int16", "int32", "int64"),
        *("float8e4m3fn", "float8e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type in the IR; FrontendError if it has none."""
    if dtype not in DTYPES:
        raise FrontendError(f"element type {dtype} is not supported")
    return DTYPES[dtype]
