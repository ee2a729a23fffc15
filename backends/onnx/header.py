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
    except (KeyError, TypeError, ValueError, AttributeError, IRError) as error:
        raise BackendError(f"{where}: metadata {PROGRAM_KEY!r}: {one_line(error)}") from error


def _parse(data: Any) -> Header:
    return Header(
        rank=int(data["rank"]),
        ranks=int(data["ranks"]),
        programs=str(data["programs"]),
        origin=Origin(str(data["plan"]), str(data["weights"])),
        comms=int(data["comms"]),
        inputs={
            name: Part(whole, parse_region(region))
            for name, (whole, region) in data["inputs"].items()
        },
        outputs=tuple(
            Output(value, whole, parse_region(region)) for value, whole, region in data["outputs"]
        ),
        whole_inputs={
            n: TensorType.of(kind, shape) for n, (kind, shape) in data["whole_inputs"].items()
        },
        whole_outputs={
            n: TensorType.of(kind, shape) for n, (kind, shape) in data["whole_outputs"].items()
        },
    )


def _types(types: Mapping[str, TensorType]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (kind.dtype, kind.shape) for name, kind in types.items()}


def parse_region(data: Any) -> Region | None:
    """A region from its JSON form."""
    if data is None:
        return None
    return tuple(tuple((int(start), int(length)) for start, length in dim) for dim in data)


def dump_transfers(transfers: Iterable[Transfer]) -> str:
    """Transfers as JSON: `[[source, target, read, write], ...]`."""
    rows = [(t.source, t.target, t.read, t.write) for t in transfers]
    return json.dumps(rows, separators=(",", ":"))


def parse_transfers(text: str) -> tuple[Transfer, ...]:
    """Transfers from JSON."""
    found = []
    for source, target, read, write in json.loads(text):
        found.append(
            Transfer(int(source), int(target), parse_region(read) or (), parse_region(write) or ())
        )
    return tuple(found)
