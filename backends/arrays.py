"""Whole inputs to local parts and local parts to whole outputs, as NumPy arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from partitioner.backends.errors import BackendError
from partitioner.backends.header import Header
from partitioner.backends.regions import cut, whole_region, write_region
from partitioner.ir.errors import typed
from partitioner.ir.exchange import Region, nested
from partitioner.ir.types import DTYPE_BITS, numpy_dtype


def check_inputs(header: Header, inputs: Mapping[str, np.ndarray]) -> None:
    """Refuse whole inputs whose names, sizes or element types are not the model's."""
    types = header.whole_inputs
    for name, type_ in header.whole_outputs.items():
        check_dtype(f"output {name!r}", type_.dtype)
    for name, type_ in types.items():
        check_dtype(f"input {name!r}", type_.dtype)
        if name not in inputs:
            raise BackendError(f"input {name!r} ({type_}) is missing; given: {_names(inputs)}")
    for name, array in inputs.items():
        if name not in types:
            raise BackendError(f"input {name!r} is not one of the model's: {_names(types)}")
        type_ = types[name]
        if not isinstance(array, np.ndarray | np.generic):
            raise BackendError(
                f"input {name!r} is {typed(array)}, not a NumPy array; numpy.asarray(...) makes one"
            )
        if tuple(array.shape) != type_.shape:
            raise BackendError(f"input {name!r} has shape {tuple(array.shape)}, not {type_.shape}")
        wanted = numpy_dtype(type_.dtype)
        if array.dtype != wanted and array.dtype.newbyteorder("=") == wanted:
            raise BackendError(
                f"input {name!r} holds {type_.dtype} elements in another machine's order of bytes; "
                "array.astype(array.dtype.newbyteorder('=')) gives this machine's"
            )
        if array.dtype != wanted:
            raise BackendError(
                f"input {name!r} holds {array.dtype.name} elements, not {type_.dtype}"
            )


def check_dtype(what: str, dtype: str) -> None:
    """Refuse elements that cannot be passed into or out of a model: packed 4-bit ones."""
    if DTYPE_BITS[dtype] < 8:
        raise BackendError(
            f"{what} holds {dtype} elements, which cannot be passed in or out of a run; "
            "Cast them from or to int8 or uint8 in the model"
        )


def _names(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"


def local_inputs(header: Header, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parts of whole inputs that a rank is fed with, by local name.

    Of a request in micro-batches, they are those of all of them, one behind the other along a
    first dim, or once if all take the same.
    """
    if header.batch is None:
        return {name: cut(inputs[part.whole], part.region) for name, part in header.inputs.items()}
    return {
        name: np.stack(
            [
                cut(inputs[part.whole], _within(region, part.region))
                for region in header.batch.regions(part.whole)
            ]
        )
        for name, part in header.inputs.items()
    }


def _within(outer: Region | None, inner: Region | None) -> Region | None:
    """A region of a micro-batch's tensor as one of the whole batch's."""
    if outer is None or inner is None:
        return outer or inner
    return nested(outer, inner)


def assemble(
    headers: Sequence[Header], parts: Mapping[int, Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Whole outputs by name, in the model's order.

    Args:
        headers: Of all ranks.
        parts: Local output values by rank and local name; of a request in micro-batches, those
            of all of them, as `local_inputs` has inputs. One whose sizes depend on data is whole.
    """
    wholes = {
        name: np.empty(type_.shape, numpy_dtype(type_.dtype))
        for name, type_ in headers[0].whole_outputs.items()
    }
    for header in headers:
        for output in header.outputs:
            whole, part = wholes[output.whole], parts[header.rank][output.value]
            if output.whole in header.bounded:
                wholes[output.whole] = part
                continue
            outer = (None,) if header.batch is None else header.batch.regions(output.whole)
            for one, of_run in zip(outer, [part] if header.batch is None else part, strict=True):
                region = _within(one, output.region)
                write_region(whole, whole_region(whole.shape) if region is None else region, of_run)
    return wholes


def save_named_arrays(file: Path | BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to an .npz file by name; `numpy.savez` takes some names for arguments."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)


def load_arrays(path: Path, dtypes: Iterable[str]) -> list[np.ndarray]:
    """The first arrays of an .npz file without names, one an element type.

    An .npz file forgets the element types that NumPy lacks; they are given back.
    """
    with np.load(path) as arrays:
        return [
            arrays[f"arr_{index}"].view(numpy_dtype(dtype)) for index, dtype in enumerate(dtypes)
        ]
