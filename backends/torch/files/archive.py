"""Exported programs (``.pt2``) read without unpickling anything that could run code.

`torch.export.load` unpickles example inputs, tensor subclasses and custom objects, evaluates
symbolic sizes as Python text, and takes any function below ``torch`` as an operator. So the archive
is opened here: tensors are raw bytes, example inputs are loaded with ``weights_only=True``, graphs
call only operators of a list (`may_call`), and everything else is refused by name.

A symbolic size is an expression and its value for the example inputs. The expression is text that
PyTorch evaluates, so only the value is taken, and the nodes that compute sizes are left out. A size
without a value, as one that depends on data, is refused.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._export.serde import schema
from torch._export.serde.serialize import (
    ExportedProgramDeserializer,
    _dict_to_dataclass,
    deserialize_scalar_type,
)
from torch.export import ExportedProgram

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.backends.errors import BackendError, one_line, why_unreadable
from partitioner.foundations.files import open_file
from partitioner.ir.ops import ROWS

Contents = TypeVar("Contents")

#: Most bytes of a JSON file or of the example inputs in an archive; weights are bounded by the
#: archive itself, as nothing in it is compressed.
MAX_TEXT_BYTES = 2**30
_MODEL = "models/model.json"
_EXAMPLE_INPUTS = "data/sample_inputs/model.pt"
_WEIGHTS = ("data/weights/", "model_weights_config.json")
_CONSTANTS = ("data/constants/", "model_constants_config.json")
_EXTRA = "extra/"
#: Fields of results and operands that are sizes.
_SIZE, _SIZES = "as_sym_int", "as_sym_ints"

_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)")
#: Name spaces of operators that a graph may call, as far as `may_call` says.
_NAMESPACES = frozenset({"aten", "partitioner", "_c10d_functional"})
#: Targets of other calls that export writes.
_OTHER_TARGETS = frozenset(
    {
        "_operator.getitem",
        "torch.ops.higher_order.cond",
        "torch.ops.higher_order.wrap_with_autocast",
        "torch.ops.higher_order.wrap_with_set_grad_enabled",
    }
)
#: Errors of the readers of its parts if a file is damaged or foreign.
_BAD = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, NotImplementedError),
    *(OSError, RecursionError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile),
)


class ArchiveError(BackendError):
    """A ``.pt2`` file that is no archive, is damaged, or holds objects that are not loaded."""


def read_program(path: Path, largest: int | None = None) -> ExportedProgram:
    """The exported program in a ``.pt2`` file; an ArchiveError names a part that is not read.

    Tensors of more elements than `largest` are without contents.
    """
    return _guarded(path, lambda archive: replace(archive, largest=largest).program())


def read_extra(path: Path, name: str) -> str:
    """A text that was saved along in a ``.pt2`` file; an ArchiveError if there is none."""
    return _guarded(path, lambda archive: archive.text(_EXTRA + name).decode())


def _guarded(path: Path, read: Callable[[_Archive], Contents]) -> Contents:
    try:
        with open_file(path) as raw, zipfile.ZipFile(raw) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(_Archive(file, os.fstat(raw.fileno()).st_size))
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from None
    except zipfile.BadZipFile as error:
        raise ArchiveError(
            f"{path}: not an archive of torch.export.save, or damaged ({one_line(error)})"
        ) from None
    except _BAD as error:
        raise ArchiveError(f"{path}: cannot be read: {why_unreadable(error)[:300]}") from error


@dataclass
class _Archive:
    file: zipfile.ZipFile
    size: int  # of the archive, in bytes
    largest: int | None = None  # elements of a tensor whose contents are read
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    @cached_property
    def members(self) -> Mapping[str, zipfile.ZipInfo]:
        """The files by name, without the folder that all are in."""
        members: dict[str, zipfile.ZipInfo] = {}
        for info in self.file.infolist():
            name = info.filename.partition("/")[2]
            if name in members:
                raise ArchiveError(f"{info.filename} is there twice")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ArchiveError(
                    f"{info.filename} is compressed, which torch.export.save never does"
                )
            if not info.file_size == info.compress_size <= self.size:
                raise ArchiveError(f"{info.filename} says that it has {info.file_size} bytes")
            members[name] = info
        return members

    def text(self, name: str) -> bytes:
        """Contents of a file other than a tensor's."""
        if name not in self.members:
            raise ArchiveError(
                f"it has no {name}: not an archive of this version of torch.export.save"
            )
        info = self.members[name]
        if info.file_size > MAX_TEXT_BYTES:
            raise ArchiveError(f"{name} has {info.file_size} bytes, more than {MAX_TEXT_BYTES}")
        return self.file.read(info)

    def program(self) -> ExportedProgram:
        data = _with_sizes(json.loads(self.text(_MODEL)), {})
        if isinstance(data, dict) and "range_constraints" in data:
            data["range_constraints"] = {}
        _check_graph(data)
        data["guards_code"] = []  # Python text, which would be run
        return ExportedProgramDeserializer().deserialize(
            _dict_to_dataclass(schema.ExportedProgram, data),  # type: ignore[no-untyped-call]
            dict(self._payload(*_WEIGHTS)),
            dict(self._payload(*_CONSTANTS)),
            self._example_inputs(),
        )

    def _example_inputs(self) -> Any:
        """((positional, ...), {keyword: ...}) of tensors and plain values."""
        data = self.text(_EXAMPLE_INPUTS)
        if not data:
            return None
        try:
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception as error:
            raise ArchiveError(
                f"{_EXAMPLE_INPUTS} would need unsafe unpickling: export the model with example "
                "inputs that are tensors, numbers, strings, and tuples, lists and dicts of these"
            ) from error

    def _payload(self, folder: str, config: str) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a folder by full name; equal entries are one object."""
        for name, entry in json.loads(self.text(folder + config))["config"].items():
            path = entry["path_name"]
            if entry["use_pickle"] or not path.startswith(("weight_", "tensor_")):
                raise ArchiveError(f"{folder}{path} ({name}) would need unsafe unpickling")
            key = folder, json.dumps(entry, sort_keys=True)
            if key not in self.tensors:
                self.tensors[key] = self._tensor(folder + path, entry)
            yield name, self.tensors[key]

    def _tensor(self, path: str, entry: Mapping[str, Any]) -> Tensor:
        meta = entry["tensor_meta"]
        dtype = deserialize_scalar_type(meta["dtype"])
        sizes = tuple(map(_integer, meta["sizes"]))
        strides = tuple(map(_integer, meta["strides"]))
        info = self.members[path]
        is_large = self.largest is not None and math.prod(sizes) > self.largest
        if is_large or (info.file_size == 0 and 0 not in sizes):
            tensor = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        else:
            key = info.filename, str(dtype)
            if key not in self.tensors:  # all elements of the file, which tensors of it share
                raw = bytearray(self.file.read(info))
                self.tensors[key] = (
                    torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
                )
            offset = _integer(meta["storage_offset"])
            tensor = self.tensors[key].as_strided(sizes, strides, offset)
        if entry["is_param"]:
            return nn.Parameter(tensor, requires_grad=bool(meta["requires_grad"]))
        return tensor


def _integer(data: Mapping[str, Any]) -> int:
    value = data["as_int"]
    if type(value) is not int:
        raise ArchiveError(f"{value!r} is not a size")
    return value


def _check_graph(data: Any) -> None:
    if isinstance(data, list):
        for item in data:
            _check_graph(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            check = _CHECKS.get(key)
            if check is not None and value is not None:
                check(value)
            is_named = key in _BY_NAME and isinstance(value, dict)
            # A model may call a value "target": the keys of these are no words of the format.
            _check_graph(list(value.values()) if is_named else value)


def _no_symbols(value: Any) -> None:
    raise ArchiveError(f"size {str(value)[:80]!r} has no value: export with static shapes")


def _no_object(value: Any) -> None:
    raise ArchiveError(f"it holds a custom object ({str(value)[:80]}), which is not loaded")


def _check_target(value: Any) -> None:
    text = str(value)
    if text in _OTHER_TARGETS:
        return
    match = _TARGET.fullmatch(text)
    if match is None or match[1] not in _NAMESPACES:
        raise ArchiveError(f"it calls {text[:80]!r}, which is not an operator that is loaded")
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    overload = getattr(packet, match[3], None)
    if not isinstance(overload, torch._ops.OpOverload):
        raise ArchiveError(f"it calls {text[:80]!r}, an operator that there is not")
    if any("file" in argument.name for argument in overload._schema.arguments):
        raise ArchiveError(f"it calls {text!r}, which opens files")
    if not may_call(match[1], match[2], match[3]):
        raise ArchiveError(f"it calls {text!r}, which is not an operator that is loaded")
    if any(argument.is_out for argument in overload._schema.arguments):
        raise ArchiveError(f"it calls {text!r}, which writes to an argument of its own choice")


def _check_structure(text: Any) -> None:
    """Refuse containers of arguments and results that are rebuilt with an import."""
    _, spec = json.loads(text)
    for part in _structure_parts(spec):
        container = str(part.get("type"))
        if "defaultdict" in container or part.get("__enum__"):
            raise ArchiveError(f"arguments or results hold a {container}, which is not loaded")


def _structure_parts(spec: Any) -> Iterator[dict[str, Any]]:
    if isinstance(spec, str) and spec[:1] in ("[", "{"):
        spec = json.loads(spec)
    if isinstance(spec, dict):
        yield spec
        for value in spec.values():
            yield from _structure_parts(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _structure_parts(value)


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "expr_str": _no_symbols,
    "as_custom_obj": _no_object,
    "target": _check_target,
    "as_operator": _check_target,
    "in_spec": _check_structure,
    "out_spec": _check_structure,
}

#: Fields of PyTorch's archive format (`torch._export.serde.schema`) whose keys are a model's names.
_BY_NAME = frozenset(
    {
        *("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"),
        *("custom_obj_values", "as_string_to_argument", "metadata", "config"),
    }
)


# Symbolic sizes ----------------------------------------------------------------------------------


def _with_sizes(data: Any, known: Mapping[str, int]) -> Any:
    """``model.json`` with numbers for symbolic sizes, of which some are `known` by name."""
    if isinstance(data, list):
        return [_with_sizes(item, known) for item in data]
    if not isinstance(data, dict):
        return data
    if "as_expr" in data:
        value = _value(data)
        return data if value is None else {"as_int": value}
    if "sym_int_values" in data:
        values = {name: _value(size) for name, size in data["sym_int_values"].items()}
        known = {name: value for name, value in values.items() if value is not None}

        def computes_sizes(node: Mapping[str, Any]) -> bool:
            return bool(node["outputs"]) and all(
                set(out) == {_SIZE} and _number(out[_SIZE], known) for out in node["outputs"]
            )

        nodes = [node for node in data["nodes"] if not computes_sizes(node)]
        data = {**data, "sym_int_values": {}, "nodes": nodes}
    if set(data) == {_SIZE}:
        return _number(data[_SIZE], known) or data
    if set(data) == {_SIZES}:
        numbers = [_number(item, known) for item in data[_SIZES]]
        return {"as_ints": [n["as_int"] for n in numbers]} if all(numbers) else data
    return {
        key: {name: _with_sizes(one, known) for name, one in value.items()}
        if key in _BY_NAME and isinstance(value, dict)
        else _with_sizes(value, known)
        for key, value in data.items()
    }


def _value(size: Mapping[str, Any]) -> int | None:
    """The value of a size for the example inputs; None if it has none."""
    if type(size.get("as_int")) is int:
        return int(size["as_int"])
    hint = (size.get("as_expr") or {}).get("hint") or {}
    return hint["as_int"] if type(hint.get("as_int")) is int else None


def _number(size: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, int]:
    """``{"as_int": 4}`` for a size that is a number or a known name, else nothing."""
    value = known.get(str(size.get("as_name")), size.get("as_int"))
    return {"as_int": value} if type(value) is int else {}


# Operators that a graph may call -----------------------------------------------------------------
# They compute results from tensors and settings. PyTorch checks these, though not all of them: the
# backward pass of a weight norm takes the size of `g` as it is. What is left out reads or writes
# files, takes memory as it is (packed weights, storages, sparse parts that are not validated), or
# is of devices and back ends that nothing here writes.

#: What the names of families of operators begin with, all of which compute.
_FAMILIES = (
    *("_fft_", "_linalg_", "_upsample_", "adaptive_", "bitwise_", "fft_", "linalg_", "logical_"),
    *("reflection_pad", "replication_pad", "slow_conv", "special_", "upsample_"),
)
#: Others that `torch.export` writes and that are decomposed, or kept whole, when they are traced,
#: and those of the backward passes of the latter.
_EXPORTED = frozenset(
    resources.files("partitioner.backends.torch.files")
    .joinpath("exported_operators.txt")
    .read_text("utf-8")
    .split()
)
#: Operators with a row.
_KNOWN = frozenset(key.partition("::")[2].partition(".")[0] for key in ROWS if key[:6] == "aten::")
#: Communications that rank files call.
_COMMUNICATIONS = frozenset((
    "all_gather_into_tensor", "all_reduce", "all_reduce_", "all_to_all_single", "irecv",
    "isend", "reduce_scatter_tensor", "wait_tensor",
))  # fmt: skip


def may_call(namespace: str, name: str, overload: str) -> bool:
    """Tell whether a graph may call an operator, such as "aten", "add", "Tensor".

    All overloads of an operator compute the same, and so does the one that writes to its operand.
    """
    if namespace == "_c10d_functional":
        return name in _COMMUNICATIONS
    if namespace == "partitioner":  # those are ours
        return True
    key = f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"
    if key in ROWS or namespace != "aten":
        return key in ROWS
    names = name, name.removesuffix("_")
    return name.startswith(_FAMILIES) or not (_KNOWN | _EXPORTED).isdisjoint(names)
