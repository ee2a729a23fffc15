"""A rank's phases as exported programs: ``rank0.pt2`` and, in training, ``rank0.backward.pt2``.

``rank0.pt2`` is the first that the rank runs, the others have their names, in stages
``rank0.forward_2.pt2``; those of a smaller last micro-batch are ``rank0.last_forward_2.pt2``.

A file holds the rank's graph with its shards of the weights (a program for inference) or takes
parameters and buffers as arguments (training). Beside the graph it holds `EXTRA`: the file's
origin, the names of its arguments and results, and the ranks of each process group that its graph
names.

Arguments are contiguous. To run a file by itself: import `partitioner.backends.torch.operators`,
start torch.distributed, and call `register_named`. Over gloo call `eager` on the graph module: the
file's all-gathers spoil the heap (see there).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.passes import move_to_device_pass

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import Header, Origin, header_data, parse_header, parse_region
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.agreeing.groups import group_ranks
from partitioner.backends.torch.files.archive import read_extra, read_program
from partitioner.backends.torch.graphs.emit import PassGraph
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH, MicroBatches
from partitioner.backends.torch.graphs.phases import RankPhases, of_each
from partitioner.ir.checks import count, text
from partitioner.ir.errors import IRError
from partitioner.ir.layout import Interval
from partitioner.ir.program import Part, Programs

#: Name of the description in an archive.
EXTRA = "partitioner.json"
#: Version of the contents of rank files; files of another version are refused.
FORMAT_VERSION = 1
CPU = torch.device("cpu")  #: The device that files are written for.
_PHASE = re.compile(r"(last )?(setup|deliver|reduce|(forward|backward|weight)( \d+)?)")


@dataclass(frozen=True)
class StepRuns:
    """The runs of a step in micro-batches, and what each of these has of the batch."""

    #: Start and length of the rows of each, of each input and output that is split.
    rows: Mapping[str, tuple[Interval, ...]]
    shares: tuple[float, ...]  #: The share of each in the loss.
    order: tuple[tuple[str, int], ...]  #: (phase, micro-batch) of all that the rank runs.


@dataclass(frozen=True)
class RankFile:
    """The description in a rank file."""

    header: Header  #: The part that rank files of all backends have.
    which: str  #: The phase: "forward" or "backward" of a whole batch, else as "forward 2".
    arguments: tuple[str, ...]  #: Local values that the graph takes, in order.
    results: tuple[str, ...]  #: Local values that it returns, in order.
    groups: tuple[tuple[int, ...], ...]  #: Ranks of each process group that any rank's graphs name.
    #: Local values that are parameters and buffers, of which the arguments may be.
    stored: tuple[str, ...]
    training: bool  #: Whether there is a backward pass.
    staged: bool = False  #: Whether the plan has a schedule of micro-batches.
    #: The part of the model's value that each stored value is; None in files that do not tell.
    parts: Mapping[str, Part] | None = None
    #: The local constant that each buffer of the graph holds.
    buffers: Mapping[str, str] = field(default_factory=dict)
    #: Local values that are added up over the micro-batches of a step.
    summed: frozenset[str] = frozenset()
    runs: StepRuns | None = None  #: None of a batch that runs as a whole.


def file_name(rank: int, which: str = "forward") -> str:
    """``rank0.pt2``, ``rank0.backward.pt2``."""
    name = which.replace(" ", "_")
    return f"rank{rank}.pt2" if which == "forward" else f"rank{rank}.{name}.pt2"


def write_phases(
    folder: Path,
    programs: Programs,
    phases: RankPhases,
    origin: Origin,
    micro: MicroBatches = WHOLE_BATCH,
    *,
    last: bool = False,
) -> None:
    """Write the files of a rank, one for each phase.

    Args:
        folder: Folder of the files.
        programs: Programs of all ranks.
        phases: The phases of the rank.
        origin: Digests of the plan and weights that they were made from.
        micro: The micro-batches of a step.
        last: Whether they are of the last micro-batch alone, which is smaller.
    """
    program = programs.ranks[phases.rank]
    common: dict[str, Any] = {
        "version": FORMAT_VERSION,
        **header_data(program, programs, len(program.comms), origin, program.constants),
        "groups": group_ranks(programs),
        "stored": phases.stored,
        "training": programs.order.table.trains,
        "parts": _stored_parts(programs, phases),
        "summed": sorted(phases.summed),
        **({} if phases.order.is_whole else {"staged": True, "runs": _runs(phases, micro)}),
    }
    for phase, name, examples in _phases(phases, last=last):
        graph = phases.graphs[phase]
        data = {**common, "pass": _phase_name(phases, phase, last=last)}
        data |= {"arguments": graph.arguments, "results": graph.results}
        data["buffers"] = graph.constants
        extra = {EXTRA: json.dumps(data)}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                exported = torch.export.export(graph.module, examples, strict=False)
                exported.example_inputs = None  # as large as the rank's values
                torch.export.save(exported, folder / name, extra_files=extra)
            except Exception as error:
                said = one_line(error)[:300]
                raise BackendError(f"{name} cannot be exported: {said}") from error


def _runs(phases: RankPhases, micro: MicroBatches) -> dict[str, Any]:
    order = phases.order.runs(phases.rank)
    return {
        "rows": micro.rows,
        "shares": micro.shares,
        "order": [(phases.name(phase), micro_batch) for phase, micro_batch in order],
    }


def _stored_parts(programs: Programs, phases: RankPhases) -> dict[str, list[Any]]:
    """The part of the model's value that each stored value of a rank is."""
    of = {home.name: (value, home.placement) for value, home in programs.homes.items()}
    parts = ((name, *of[name]) for name in phases.stored)
    return {name: [value, at.region(at.mesh.coord(phases.rank))] for name, value, at in parts}


def _phases(phases: RankPhases, *, last: bool) -> Iterator[tuple[int, str, tuple[Tensor, ...]]]:
    """Each phase with the name of its file, and empty arguments of the sizes and strides of a run.

    The phase of all micro-batches together is none of a smaller last one.
    """
    fakes: dict[str, Tensor] = {}
    for phase, graph in phases.graphs.items():
        messages = {message.name: message for message in graph.receives}
        examples = []
        for name in graph.arguments:
            if (message := messages.get(name)) is not None:
                examples.append(torch.empty(message.numel, dtype=message.dtype))
                continue
            of = phases.types[name]
            strides = fakes.get(name, torch.empty(of.shape, device="meta")).stride()
            dtype = torch_dtype(of.dtype)
            examples.append(torch.empty_strided(of.shape, strides, dtype=dtype))
        if phase != max(phases.graphs):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
                results = graph.module(*map(mode.from_tensor, examples))
            fakes |= dict(zip(graph.results, results, strict=True))
        if not last or not phases.is_of_all(phase):
            yield phase, _phase_file(phases, phase, last=last), tuple(examples)


def _phase_name(phases: RankPhases, phase: int, *, last: bool) -> str:
    return ("last " if last else "") + phases.name(phase)


def _phase_file(phases: RankPhases, phase: int, *, last: bool) -> str:
    is_first = phase == min(phases.graphs) and not last
    return file_name(phases.rank, "forward" if is_first else _phase_name(phases, phase, last=last))


def written_phases(
    folder: Path, phases: Sequence[RankPhases], device: torch.device = CPU
) -> list[RankPhases]:
    """The phases of a rank in each micro-batch, as `with_written_phases`."""
    return of_each(
        phases,
        lambda one: with_written_phases(folder, one, last=one is not phases[0], device=device),
    )


def with_written_phases(
    folder: Path, phases: RankPhases, *, last: bool = False, device: torch.device = CPU
) -> RankPhases:
    """The phases of a rank, with the graphs in a folder's files, for a device."""
    graphs = dict(phases.graphs)
    for phase, graph in phases.graphs.items():
        if last and phases.is_of_all(phase):
            continue
        path = folder / _phase_file(phases, phase, last=last)
        file = read_rank_file(path)
        which = _phase_name(phases, phase, last=last)
        if (file.header.rank, file.which) != (phases.rank, which):
            raise BackendError(f"{path} is the {file.which} pass of rank {file.header.rank}")
        # a file may take more stored values, or none at rest, and has an order of its own
        more = {*file.arguments} - {*graph.arguments}
        fewer = {*graph.arguments} - {*file.arguments}
        is_whole = len(file.arguments) == len(graph.arguments) + len(more) - len(fewer)
        is_whole = is_whole and more <= {*phases.stored} and fewer <= phases.rests
        is_same = {*file.results} == {*graph.results} and file.summed == phases.summed
        if not is_whole or not is_same:
            raise BackendError(f"{path} takes or gives other values than the plan's program")
        program = read_program(path)
        if device != CPU:
            program = move_to_device_pass(program, device)
        module = program.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        graphs[phase] = PassGraph(module, file.arguments, file.results, graph.receives, graph.sends)
    return replace(phases, graphs=graphs)


def read_rank_file(path: Path) -> RankFile:
    """The description in a rank file; its graph and weights are not read."""
    try:
        data = json.loads(read_extra(path, EXTRA))
        if data["version"] != FORMAT_VERSION:
            raise BackendError(
                f"{path} has format version {data['version']}, this is {FORMAT_VERSION}"
            )
        return RankFile(
            parse_header(data),
            _phase_named(data["pass"]),
            tuple(map(text, data["arguments"])),
            tuple(map(text, data["results"])),
            tuple(tuple(map(count, ranks)) for ranks in data["groups"]),
            tuple(map(text, data["stored"])),
            bool(data["training"]),
            bool(data.get("staged")),
            _parsed_parts(data["parts"]) if "parts" in data else None,
            {text(buffer): text(name) for buffer, name in data.get("buffers", {}).items()},
            frozenset(map(text, data.get("summed", ()))),
            _parsed_runs(data["runs"]) if "runs" in data else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IRError) as error:
        raise BackendError(f"{path}: {EXTRA}: {one_line(error)}") from error


def _parsed_parts(data: Any) -> dict[str, Part]:
    return {
        text(name): Part(text(value), parse_region(region))
        for name, (value, region) in data.items()
    }


def _parsed_runs(data: Any) -> StepRuns:
    rows = {
        text(name): tuple((count(start), count(length)) for start, length in of)
        for name, of in data["rows"].items()
    }
    order = tuple((_phase_named(text(name)), count(index)) for name, index in data["order"])
    return StepRuns(rows, tuple(map(float, data["shares"])), order)


def _phase_named(name: str) -> str:
    if not _PHASE.fullmatch(name):
        raise ValueError(f"{name!r} is no pass")
    return name


def read_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """The descriptions of the forward passes of all ranks."""
    files = [read_rank_file(folder / file_name(0))]
    first = files[0].header
    for rank in range(1, first.ranks):
        path = folder / file_name(rank)
        files.append(read_rank_file(path))
        header = files[rank].header
        if header.rank != rank or (header.ranks, header.programs, header.origin) != (
            first.ranks,
            first.programs,
            first.origin,
        ):
            raise BackendError(f"{path} is not of the plan that {file_name(0)} is of")
    return tuple(files)
