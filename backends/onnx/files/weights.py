"""Constants of a rank file: small ones inside it, the others in one file of raw bytes beside it.

The rank file ends with the SHA-256 of all that is before it and of the other file: one bit that a
disk or a copy changes would make results wrong, and nothing else would tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, StringStringEntryProto, TensorProto

from partitioner.backends.errors import BackendError, why_unreadable
from partitioner.backends.onnx.files.messages import attribute_graphs, tensor_proto
from partitioner.foundations.files import open_file
from partitioner.ir.types import TensorType, onnx_dtype

#: Tensors of at least this many bytes go to the weight file.
EXTERNAL_BYTES = 4096
#: Offsets in the weight file are multiples of a memory page, so that tensors can be mapped.
_ALIGNMENT = 4096
#: Key of the digest in the rank file's metadata.
DIGEST_KEY = "partitioner.sha256"
_ZEROS = bytes(2**20)

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
        self._sha256 = hashlib.sha256()

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
        self._add_zeros(offset - self._end)
        if array is None:
            self._add_zeros(type_.nbytes)
        else:
            raw: memoryview | bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            if type_.dtype in ("int4", "uint4"):  # packed in pairs
                raw = tensor_proto(name, array, type_.dtype).raw_data
            self._file.seek(offset)
            self._file.write(raw)
            self._sha256.update(raw)
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

    def _add_zeros(self, count: int) -> None:
        """Count zeros that the file has as a hole."""
        for start in range(0, count, len(_ZEROS)):
            self._sha256.update(_ZEROS[: count - start])

    def sealed(self, model: ModelProto) -> bytes:
        """The bytes of the rank file, which end with the digest; all constants are there."""
        data: bytes = model.SerializeToString()
        digest = self._sha256.copy()
        digest.update(data)
        return data + _seal(digest.hexdigest())


def _seal(digest: str) -> bytes:
    """The end of a rank file: two messages one after the other are one, with both's metadata."""
    entry = StringStringEntryProto(key=DIGEST_KEY, value=digest)
    return bytes(ModelProto(metadata_props=[entry]).SerializeToString())


def check_digest(path: Path, data: bytes, model: ModelProto) -> None:
    """Refuse a rank file that is not as it was written: `data`, or `model`; all constants are read.

    Files of earlier versions have no digest: their constants lie in the file of weights, at least.
    """
    weights = path.with_suffix(".weights")
    outside = (t for t in _tensors(model.graph) if t.data_location == TensorProto.EXTERNAL)
    need = max((_end(path, tensor) for tensor in outside), default=0)
    digest = hashlib.sha256()
    if need:
        _add_file(digest, weights, need)
    known = [entry.value for entry in model.metadata_props if entry.key == DIGEST_KEY]
    if not known:
        return
    digest.update(data[: -len(_seal(known[0]))])
    if known != [digest.hexdigest()] or not data.endswith(_seal(known[0])):
        files = f"{path} or {weights.name}" if need else str(path)
        raise BackendError(
            f"{files} is not as it was written: copy the files anew, or partition again"
        )


def _add_file(digest: hashlib._Hash, path: Path, need: int) -> None:
    try:
        with open_file(path) as file:
            size = 0
            while block := file.read(2**22):
                digest.update(block)
                size += len(block)
                if size > need:
                    break
    except OSError as error:
        raise BackendError(f"{path}: {why_unreadable(error)}") from None
    if size != need:
        raise BackendError(
            f"{path} has {'more than ' if size > need else ''}{min(size, need)} bytes, not {need}: "
            "it is not the file that was written; copy it anew or partition again"
        )


def _end(path: Path, tensor: TensorProto) -> int:
    """The byte of the file of weights at which a constant ends."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    numbers = entries.get("offset", ""), entries.get("length", "")
    if entries.get("location") != path.with_suffix(".weights").name or not all(
        number.isascii() and number.isdigit() and len(number) < 19 for number in numbers
    ):
        raise BackendError(
            f"{path}: constant {tensor.name!r} lies in {entries.get('location')!r} at "
            f"{numbers[0]!r}, not in {path.with_suffix('.weights').name}"
        )
    return sum(map(int, numbers))


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
            for body in attribute_graphs(attribute):
                yield from _tensors(body)
