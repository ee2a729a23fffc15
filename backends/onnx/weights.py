"""Constants of a rank file: small ones inside it, the others in one file of raw bytes beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from onnx import TensorProto

from partitioner.backends.onnx.nodes import tensor_proto
from partitioner.ir.onnx_types import onnx_dtype
from partitioner.ir.types import TensorType

#: Tensors of at least this many bytes go to the weight file.
EXTERNAL_BYTES = 4096
#: Offsets in the weight file are multiples of a memory page, so that tensors can be mapped.
_ALIGNMENT = 4096

#: Writes a constant of this name and type; None stands for zeros.
Store = Callable[[str, TensorType, np.ndarray | None], TensorProto]


def inline_tensor(name: str, type_: TensorType, array: np.ndarray | None) -> TensorProto:
    """A constant with its bytes inside the message (at most 2 GB): a `Store`."""
    if array is not None:
        return tensor_proto(name, array, type_.dtype)
    return TensorProto(
        name=name,
        data_type=onnx_dtype(type_.dtype),
        dims=type_.shape,
        raw_data=bytes(type_.nbytes),
    )


class WeightFile:
    """Streams constants into one file, which is made when there is something to write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._end = 0

    def close(self) -> None:
        """Give the file its full length: zeros at its end are a hole."""
        if self._file is not None:
            self._file.truncate(self._end)
            self._file.close()

    def tensor(self, name: str, type_: TensorType, array: np.ndarray | None) -> TensorProto:
        """A constant that refers to the file if it is large: a `Store`. Zeros become a hole."""
        if type_.nbytes < EXTERNAL_BYTES:
            return inline_tensor(name, type_, array)
        if self._file is None:
            self._file = self._path.open("wb")
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if array is not None:
            self._file.seek(offset)
            self._file.write(_raw(name, type_, array))
        self._end = offset + type_.nbytes
        proto = TensorProto(
            name=name,
            data_type=onnx_dtype(type_.dtype),
            dims=type_.shape,
            data_location=TensorProto.EXTERNAL,
        )
        entries = (("location", self._path.name), ("offset", offset), ("length", type_.nbytes))
        for key, value in entries:
            proto.external_data.add(key=key, value=str(value))
        return proto


def _raw(name: str, type_: TensorType, array: np.ndarray) -> memoryview | bytes:
    if type_.dtype in ("int4", "uint4"):  # packed in pairs
        return tensor_proto(name, array, type_.dtype).raw_data
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
