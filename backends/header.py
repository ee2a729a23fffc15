"""The description of a rank that its file holds beside the nodes, as plain JSON data."""

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
    """The plan and weights that rank files were made from: a reader sees if they are outdated.

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
        rank: The rank.
        ranks: Number of ranks.
        programs: Digest of what all ranks exchange; the files of one folder have the same.
        origin: The plan and weights behind the files; the same in all of a folder.
        comms: Number of communications in the file (local slices are ordinary nodes).
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
    sha256 = hashlib.sha256()
    for program in programs.ranks:
        for comm in program.comms:
            plain = replace(comm, source="", target="", why="")
            sha256.update(f"{program.rank} {plain!r}\n".encode())
    return sha256.hexdigest()


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
        KeyError, TypeError, ValueError, AttributeError, IRError: It is malformed.
    """
    inputs, outputs = _parse_types(data["whole_inputs"]), _parse_types(data["whole_outputs"])
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


def _parse_types(data: Any) -> dict[str, TensorType]:
    return {n: TensorType.of(text(dtype), map(count, shape)) for n, (dtype, shape) in data.items()}


def count(value: Any) -> int:
    """The value if it is a whole number of at least 0.

    Raises:
        ValueError: It is none.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def text(value: Any) -> str:
    """The value if it is text.

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
    return {name: (type_.dtype, type_.shape) for name, type_ in types.items()}


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
