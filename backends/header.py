"""What a rank file says about itself beside its nodes, as plain JSON data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from partitioner.ir.exchange import Region
from partitioner.ir.program import Output, Part, Programs, RankProgram
from partitioner.ir.types import TensorType


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


def header_data(
    program: RankProgram, programs: Programs, comms: int, origin: Origin
) -> dict[str, Any]:
    """The description of one rank's file; `parse_header` reads it."""
    return {
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


def parse_header(data: Any) -> Header:
    """A description from its JSON form.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IRError: It is none.
    """
    inputs, outputs = _read_types(data["whole_inputs"]), _read_types(data["whole_outputs"])
    return Header(
        rank=count(data["rank"]),
        ranks=count(data["ranks"]),
        programs=text(data["programs"]),
        origin=Origin(text(data["plan"]), text(data["weights"])),
        comms=count(data["comms"]),
        inputs={
            name: Part(text(whole), _region_of(inputs[text(whole)], region))
            for name, (whole, region) in data["inputs"].items()
        },
        outputs=tuple(
            Output(text(value), text(whole), _region_of(outputs[text(whole)], region))
            for value, whole, region in data["outputs"]
        ),
        whole_inputs=inputs,
        whole_outputs=outputs,
    )


def _read_types(data: Any) -> dict[str, TensorType]:
    return {n: TensorType.of(text(kind), map(count, shape)) for n, (kind, shape) in data.items()}


def count(value: Any) -> int:
    """A whole number of at least 0.

    Raises:
        ValueError: It is none.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def text(value: Any) -> str:
    """Text.

    Raises:
        TypeError: It is none.
    """
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
    return tuple(tuple((count(start), count(length)) for start, length in dim) for dim in data)


def fits(region: Region, shape: tuple[int, ...]) -> bool:
    """Whether a region lies within a tensor of this shape."""
    return len(region) == len(shape) and all(
        start + length <= size
        for dim, size in zip(region, shape, strict=True)
        for start, length in dim
    )
