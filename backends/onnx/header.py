"""What a rank file says about itself beside its nodes: one JSON text in the model's metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onnx import ModelProto

from partitioner.backends.errors import BackendError, one_line
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.program import Output, Part, Programs, RankProgram
from partitioner.ir.types import TensorType

#: Domain of the communication operators and of the keys in metadata.
DOMAIN = "partitioner"
#: Version of what rank files hold; files of another version are refused.
FORMAT_VERSION = 2
PROGRAM_KEY = f"{DOMAIN}.program"
VERSION_KEY = f"{DOMAIN}.format_version"


@dataclass(frozen=True)
class Origin:
    """What rank files were made from, so that a reader sees when they are out of date.

    Attributes:
        plan: `Plan.digest` of the plan; "" for programs that are of no stored plan.
        weights: `Graph.weights_digest` of the model; "" likewise.
    """

    plan: str = ""
    weights: str = ""


@dataclass(frozen=True)
class Header:
    """A rank file's description.

    Attributes:
        rank: Which rank it is of.
        ranks: How many there are.
        programs: Digest of what all ranks exchange; the files of one folder have the same.
        origin: What the files were made from; the same in all of a folder.
        comms: Communications that the file holds (local slices are ordinary nodes).
        inputs: Part of a whole input by local value.
        outputs: Parts of whole outputs that this rank delivers.
        whole_inputs: Types of the model's inputs.
        whole_outputs: Types of the model's outputs.
    """

    rank: int
    ranks: int
    programs: str
    origin: Origin
    comms: int
    inputs: Mapping[str, Part]
    outputs: tuple[Output, ...]
    whole_inputs: Mapping[str, TensorType]
    whole_outputs: Mapping[str, TensorType]


def digest(programs: Programs) -> str:
    """SHA-256 of the communications of all ranks, apart from local names."""
    found = hashlib.sha256()
    for program in programs.ranks:
        for comm in program.comms:
            plain = replace(comm, source="", target="", why="")
            found.update(f"{program.rank} {plain!r}\n".encode())
    return found.hexdigest()


def write_header(
    model: ModelProto, program: RankProgram, programs: Programs, comms: int, origin: Origin
) -> None:
    """Add the description of one rank to its file's metadata (`model` is modified)."""
    data = {
        "rank": program.rank,
        "ranks": len(programs.ranks),
        "programs": digest(programs),
        "plan": origin.plan,
        "weights": origin.weights,
        "comms": comms,
        "inputs": {name: [part.whole, part.region] for name, part in program.inputs.items()},
        "outputs": [[output.value, output.whole, output.region] for output in program.outputs],
        "whole_inputs": _types(programs.inputs),
        "whole_outputs": _types(programs.outputs),
    }
    model.metadata_props.add(key=VERSION_KEY, value=str(FORMAT_VERSION))
    model.metadata_props.add(key=PROGRAM_KEY, value=json.dumps(data, separators=(",", ":")))


def read_header(model: ModelProto, where: str) -> Header:
    """The description in a rank file.

    Args:
        model: The file's message.
        where: What to call it in errors.

    Raises:
        BackendError: It is no rank file, or one of another version.
    """
    found = {entry.key: entry.value for entry in model.metadata_props}
    if PROGRAM_KEY not in found:
        raise BackendError(f"{where} is not a rank file: its metadata lacks {PROGRAM_KEY!r}")
    version = found.get(VERSION_KEY)
    if version != str(FORMAT_VERSION):
        raise BackendError(f"{where} has format version {version}, this is {FORMAT_VERSION}")
    try:
        return _parse(json.loads(found[PROGRAM_KEY]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IRError) as error:
        raise BackendError(f"{where}: metadata {PROGRAM_KEY!r}: {one_line(error)}") from error


def _parse(data: Any) -> Header:
    inputs, outputs = _read_types(data["whole_inputs"]), _read_types(data["whole_outputs"])
    return Header(
        rank=_count(data["rank"]),
        ranks=_count(data["ranks"]),
        programs=_text(data["programs"]),
        origin=Origin(_text(data["plan"]), _text(data["weights"])),
        comms=_count(data["comms"]),
        inputs={
            name: Part(_text(whole), _region_of(inputs[_text(whole)], region))
            for name, (whole, region) in data["inputs"].items()
        },
        outputs=tuple(
            Output(_text(value), _text(whole), _region_of(outputs[_text(whole)], region))
            for value, whole, region in data["outputs"]
        ),
        whole_inputs=inputs,
        whole_outputs=outputs,
    )


def _read_types(data: Any) -> dict[str, TensorType]:
    return {n: TensorType.of(_text(kind), map(_count, shape)) for n, (kind, shape) in data.items()}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _region_of(whole: TensorType, data: Any) -> Region | None:
    """A region of a whole tensor, within its bounds."""
    region = parse_region(data)
    if region is not None and not fits(region, whole.shape):
        raise ValueError(f"region {data} is not within {whole}")
    return region


def _types(types: Mapping[str, TensorType]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (kind.dtype, kind.shape) for name, kind in types.items()}


def parse_region(data: Any) -> Region | None:
    """A region from its JSON form."""
    if data is None:
        return None
    return tuple(tuple((_count(start), _count(length)) for start, length in dim) for dim in data)


def fits(region: Region, shape: tuple[int, ...]) -> bool:
    """Whether a region lies within a tensor of this shape."""
    return len(region) == len(shape) and all(
        start + length <= size
        for dim, size in zip(region, shape, strict=True)
        for start, length in dim
    )


def dump_transfers(transfers: Iterable[Transfer]) -> str:
    """Transfers as JSON: `[[source, target, read, write], ...]`."""
    rows = [(t.source, t.target, t.read, t.write) for t in transfers]
    return json.dumps(rows, separators=(",", ":"))


def parse_transfers(text: str) -> tuple[Transfer, ...]:
    """Transfers from JSON."""
    found = []
    for source, target, read, write in json.loads(text):
        found.append(
            Transfer(
                _count(source), _count(target), parse_region(read) or (), parse_region(write) or ()
            )
        )
    return tuple(found)
