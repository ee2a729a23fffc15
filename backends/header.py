"""The description of a rank that its file holds beside the nodes, as plain JSON data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from partitioner.backends.regions import region_shape
from partitioner.ir.checks import count, text
from partitioner.ir.exchange import Region, nested
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import Copies
from partitioner.ir.phases import RunOrder
from partitioner.ir.pipeline.text import from_csv, to_csv
from partitioner.ir.pipeline.timeline import check
from partitioner.ir.program import BatchParts, Output, Part, Programs, RankProgram
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class Origin:
    """The plan and weights that rank files were made from: a reader sees if they are outdated."""

    plan: str = ""  #: `Plan.digest` of the plan; "" for programs that are of no stored plan.
    weights: str = ""  #: `Graph.weights_digest` of the model; "" likewise.


@dataclass(frozen=True)
class Batch:
    """The micro-batches of a request."""

    parts: BatchParts  #: Their parts of the request.
    order: RunOrder  #: The order in which ranks run their phases.

    def regions(self, name: str) -> tuple[Region | None, ...]:
        """The part of each micro-batch in a whole input or output; one None if they share it."""
        return self.parts.regions.get(name, (None,))


@dataclass(frozen=True)
class Header:
    """A rank file's description."""

    rank: int
    ranks: int  #: Number of ranks.
    programs: str  #: Digest of what all ranks exchange; the files of one folder have the same.
    origin: Origin  #: The plan and weights behind the files; the same in all of a folder.
    comms: int  #: Number of communications in the file (local slices are ordinary nodes).
    #: Part of a whole input by local value; of a request in micro-batches, the part in that of a
    #: micro-batch.
    inputs: Mapping[str, Part]
    outputs: tuple[Output, ...]  #: Parts of whole outputs that this rank delivers; likewise.
    whole_inputs: Mapping[str, TensorType]  #: Types of the model's inputs.
    whole_outputs: Mapping[str, TensorType]  #: Types of the model's outputs.
    #: The micro-batches that a request runs in; None if it runs as a whole.
    batch: Batch | None = None
    #: The model's outputs whose sizes depend on data: those of their types are bounds.
    bounded: frozenset[str] = frozenset()
    copies: Copies | None = None  #: Whole copies, of which each request has one.
    #: Part of a whole constant by local value; None in files of versions that do not tell.
    constants: Mapping[str, Part] | None = None
    #: The input of the next call that each of these outputs becomes, by name: ranks deliver the
    #: parts of such an output that they hold, also those that others deliver.
    fed: Mapping[str, str] = field(default_factory=dict)

    def of_request(self, number: int, headers: Sequence[Header]) -> list[Header]:
        """The headers, of those of all ranks, that have a part in a request."""
        if self.copies is None:
            return [*headers]
        own = self.copies.devices[self.copies.serving(number + 1)[number]]
        return [header for header in headers if header.rank in own]

    def served(self, requests: int) -> list[int]:
        """The numbers of the requests that the rank has a part in."""
        copies = self.copies
        return [*range(requests)] if copies is None else copies.of_rank(self.rank, requests)

    def run_type(self, name: str) -> TensorType:
        """Type of an input or output in one run: of the request, or of a micro-batch."""
        whole = self.whole_inputs.get(name) or self.whole_outputs[name]
        return whole if self.batch is None else _part_type(whole, self.batch.regions(name)[0])


def digest(programs: Programs) -> str:
    """SHA-256 of the communications of all ranks, apart from local names."""
    sha256 = hashlib.sha256()
    for program in programs.ranks:
        for comm in program.comms:
            plain = replace(comm, source="", target="", why="")
            sha256.update(f"{program.rank} {plain!r}\n".encode())
    return sha256.hexdigest()


def header_data(
    program: RankProgram,
    programs: Programs,
    comms: int,
    origin: Origin,
    constants: Mapping[str, Part],
    parts: BatchParts | None = None,
) -> dict[str, Any]:
    """The description of a rank's file, with `parts` of a request if the file tells them apart.

    `constants` has the part of a constant of the model by local value.
    """
    types, batch = {**programs.inputs, **programs.outputs}, None
    if parts is not None:
        schedule = to_csv(programs.order.table).splitlines()
        types = {**types, **parts.types}
        batch = {"regions": parts.regions, "lanes": programs.order.lanes, "schedule": schedule}
    return {
        "rank": program.rank,
        "ranks": len(programs.ranks),
        "programs": digest(programs),
        "plan": origin.plan,
        "weights": origin.weights,
        "comms": comms,
        "inputs": {name: [part.whole, part.region] for name, part in program.inputs.items()},
        "outputs": [[output.value, output.whole, output.region] for output in program.outputs],
        "constants": {n: [p.whole, p.region, int(p.zero)] for n, p in constants.items()},
        "whole_inputs": {n: (types[n].dtype, types[n].shape) for n in programs.inputs},
        "whole_outputs": {n: (types[n].dtype, types[n].shape) for n in programs.outputs},
        **({} if batch is None else {"batch": batch}),
        **({"bounded": sorted(programs.bounded)} if programs.bounded else {}),
        **({"copies": vars(programs.copies)} if programs.copies else {}),
        **({"fed": dict(programs.fed)} if programs.fed else {}),
    }


def constant_parts(program: RankProgram, graph: Graph) -> dict[str, Part]:
    """Parts of the model's constants by local value; `graph` may be a rewritten one."""
    parts = {}
    for name, part in program.constants.items():
        constant = graph.constants.get(part.whole)
        if constant is None or constant.part is None or part.zero:
            parts[name] = part
            continue
        whole, region = constant.part
        inner = region if part.region is None else nested(region, part.region)
        parts[name] = Part(whole, inner)
    return parts


def parse_header(data: Any) -> Header:
    """A description from its JSON form.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IRError: It is malformed.
    """
    inputs, outputs = _parse_types(data["whole_inputs"]), _parse_types(data["whole_outputs"])
    ranks, bounded = count(data["ranks"]), frozenset(map(text, data.get("bounded", ())))
    if unknown := sorted(bounded - outputs.keys()):
        raise ValueError(f"{unknown[0]!r} is not an output")
    fed = {text(result): text(name) for result, name in data.get("fed", {}).items()}
    if not (fed.keys() <= outputs.keys() and set(fed.values()) <= inputs.keys()):
        raise ValueError(f"{fed} are not pairs of an output and an input")
    batch = _parse_batch(data["batch"], {**inputs, **outputs}, ranks) if "batch" in data else None

    def part(whole: str, region: Any) -> Region | None:
        """A region of an input or output, or of a micro-batch's part of it."""
        type_ = {**inputs, **outputs}[whole]
        own = type_ if batch is None else _part_type(type_, batch.regions(whole)[0])
        return _region_of(own, region)

    return Header(
        rank=count(data["rank"]),
        ranks=ranks,
        programs=text(data["programs"]),
        origin=Origin(text(data["plan"]), text(data["weights"])),
        comms=count(data["comms"]),
        inputs={
            name: Part(text(whole), part(text(whole), region))
            for name, (whole, region) in data["inputs"].items()
        },
        outputs=tuple(
            Output(text(value), text(whole), part(text(whole), region))
            for value, whole, region in data["outputs"]
        ),
        whole_inputs=inputs,
        whole_outputs=outputs,
        batch=batch,
        bounded=bounded,
        copies=_parse_copies(data["copies"], ranks) if "copies" in data else None,
        constants=_parse_constants(data["constants"]) if "constants" in data else None,
        fed=fed,
    )


def _parse_constants(data: Any) -> dict[str, Part]:
    return {
        name: Part(text(whole), parse_region(region), bool(count(zero)))
        for name, (whole, region, zero) in data.items()
    }


def _parse_copies(data: Any, ranks: int) -> Copies:
    devices = tuple(tuple(map(count, copy)) for copy in data["devices"])
    seconds = tuple(float(s) for s in data["seconds"])
    used = [device for copy in devices for device in copy]
    if len(devices) != len(seconds) or len({*used}) != len(used) or not all(devices):
        raise ValueError(f"copies {data} are not on devices of their own")
    if max(used) >= ranks or not all(0 <= s < math.inf for s in seconds):
        raise ValueError(f"copies {data} are not on {ranks} ranks, or take no number of seconds")
    return Copies(devices, seconds)


def _parse_batch(data: Any, types: Mapping[str, TensorType], ranks: int) -> Batch:
    table = from_csv("\n".join(map(text, data["schedule"])) + "\n")
    check(table, ())
    lanes = tuple(tuple(map(count, lane)) for lane in data["lanes"])
    devices = sorted(device for lane in lanes for device in lane)
    if len(lanes) != len(table.lanes) or len(set(devices)) < len(devices) or not all(lanes):
        raise ValueError(f"lanes {lanes} are not those of a schedule of {len(table.lanes)} lanes")
    if max(devices) >= ranks:
        raise ValueError(f"lanes {lanes} have more than {ranks} ranks")
    regions = {}
    for name, parsed in data["regions"].items():
        parts = tuple(_region_of(types[name], part) or () for part in parsed)
        shapes = {region_shape(part) for part in parts}
        if len(parts) != table.micro_batches or len(shapes) != 1:
            raise ValueError(f"{name!r} has no {table.micro_batches} equal parts")
        regions[name] = parts
    return Batch(BatchParts(table.micro_batches, types, regions), RunOrder(table, lanes))


def _part_type(whole: TensorType, region: Region | None) -> TensorType:
    return whole if region is None else TensorType.of(whole.dtype, region_shape(region))


def _parse_types(data: Any) -> dict[str, TensorType]:
    return {n: TensorType.of(text(dtype), map(count, shape)) for n, (dtype, shape) in data.items()}


def _region_of(whole: TensorType, data: Any) -> Region | None:
    region = parse_region(data)
    if region is not None and not fits(region, whole.shape):
        raise ValueError(f"region {data} is not within {whole}")
    return region


def parse_region(data: Any) -> Region | None:
    """A region from its JSON form."""
    if data is None:
        return None
    return tuple(tuple((count(start), count(length)) for start, length in dim) for dim in data)


def fits(region: Region, shape: tuple[int, ...]) -> bool:
    """Test whether a region lies within a tensor of this shape."""
    return len(region) == len(shape) and all(
        start + length <= size
        for dim, size in zip(region, shape, strict=True)
        for start, length in dim
    )
