"""A rank's passes as exported programs: ``rank0.pt2`` and, in training, ``rank0.backward.pt2``.

A file holds the rank's graph with its own part of the weights (a program for inference) or takes
parameters and buffers as arguments (training). Beside the graph it holds `EXTRA`, which says what
it was made from, the names of its arguments and results, and the ranks of each process group that
its graph names.

Arguments are contiguous. To run a file by itself: import `partitioner.backends.torch.operators`,
start torch.distributed, and call `register_named`. Over gloo call `eager` on the graph module: what
the file has for an all-gather spoils the heap (see there).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import Header, Origin, count, header_data, parse_header, text
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.archive import read_extra, read_program
from partitioner.backends.torch.emit import PassGraph, RankGraphs
from partitioner.backends.torch.groups import group_ranks
from partitioner.ir.errors import IRError
from partitioner.ir.program import Programs

#: Name of the description in an archive.
EXTRA = "partitioner.json"
#: Version of what rank files hold; files of another version are refused.
FORMAT_VERSION = 1
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class RankFile:
    """What a rank file says about itself.

    Attributes:
        header: As of every rank file.
        which: "forward" or "backward".
        arguments: Local values that the graph takes, in order.
        results: Local values that it returns, in order.
        groups: Ranks of each process group that any rank's graphs name.
        stored: Local values that are parameters and buffers, among the arguments.
        training: Whether there is a backward pass.
    """

    header: Header
    which: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    stored: tuple[str, ...]
    training: bool


def file_name(rank: int, which: str = "forward") -> str:
    """``rank0.pt2``, ``rank0.backward.pt2``."""
    return f"rank{rank}.pt2" if which == "forward" else f"rank{rank}.{which}.pt2"


def write_ranks(
    folder: Path, programs: Programs, ranks: Sequence[RankGraphs], origin: Origin
) -> None:
    """Write the files of all ranks.

    Args:
        folder: An existing folder.
        programs: What the ranks run.
        ranks: Their graphs.
        origin: What they were made from.

    Raises:
        BackendError: PyTorch cannot export a graph.
    """
    for program, graphs in zip(programs.ranks, ranks, strict=True):
        comms = len(program.comms)
        common = header_data(program, programs, comms, origin)
        common["groups"] = group_ranks(programs)
        common["stored"] = graphs.stored
        common["training"] = graphs.backward is not None
        for which, one, examples in _passes(graphs):
            data = {"version": FORMAT_VERSION, **common, "pass": which}
            data |= {"arguments": one.arguments, "results": one.results}
            _write(folder / file_name(graphs.rank, which), one.module, examples, data)


def _passes(graphs: RankGraphs) -> Iterator[tuple[str, PassGraph, tuple[torch.Tensor, ...]]]:
    """The passes, each with arguments that have the sizes and strides of a run."""
    values = _Examples(graphs)
    yield "forward", graphs.forward, values.arguments(graphs.forward)
    if graphs.backward is not None:
        values.run(graphs.forward)
        yield "backward", graphs.backward, values.arguments(graphs.backward)


class _Examples:
    """Values of a rank without contents."""

    def __init__(self, graphs: RankGraphs) -> None:
        self.types = graphs.types
        self.made: dict[str, torch.Tensor] = {}

    def arguments(self, one: PassGraph) -> tuple[torch.Tensor, ...]:
        return tuple(self._empty(name) for name in one.arguments)

    def _empty(self, name: str) -> torch.Tensor:
        kind = self.types[name]
        like = self.made.get(name)
        strides = torch.empty(kind.shape, device="meta").stride() if like is None else like.stride()
        return torch.empty_strided(kind.shape, strides, dtype=torch_dtype(kind.dtype))

    def run(self, one: PassGraph) -> None:
        """Find the strides of what a pass returns."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fed = [mode.from_tensor(tensor) for tensor in self.arguments(one)]
            self.made.update(zip(one.results, one.module(*fed), strict=True))


def _write(
    path: Path, module: fx.GraphModule, examples: tuple[torch.Tensor, ...], data: Mapping[str, Any]
) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(module, examples, strict=False)
            program.example_inputs = None  # as large as the rank's values
            torch.export.save(program, path, extra_files={EXTRA: json.dumps(data)})
        except Exception as error:
            raise BackendError(
                f"{path.name} cannot be exported: {one_line(error)[:300]}"
            ) from error


def read_rank_file(path: Path) -> RankFile:
    """What a rank file says about itself; its graph and weights are not read.

    Raises:
        BackendError: It is no rank file, or one of another version.
    """
    try:
        data = json.loads(read_extra(path, EXTRA))
        if data["version"] != FORMAT_VERSION:
            raise BackendError(
                f"{path} has format version {data['version']}, this is {FORMAT_VERSION}"
            )
        return RankFile(
            parse_header(data),
            PASSES[PASSES.index(data["pass"])],
            tuple(map(text, data["arguments"])),
            tuple(map(text, data["results"])),
            tuple(tuple(map(count, ranks)) for ranks in data["groups"]),
            tuple(map(text, data["stored"])),
            bool(data["training"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IRError) as error:
        raise BackendError(f"{path}: {EXTRA}: {one_line(error)}") from error


def read_rank_files(folder: Path) -> tuple[RankFile, ...]:
    """The descriptions of the forward passes of all ranks.

    Raises:
        BackendError: A file is missing or wrong, or they are of different programs.
    """
    first = read_rank_file(folder / file_name(0))
    found = [first]
    for rank in range(1, first.header.ranks):
        path = folder / file_name(rank)
        one = read_rank_file(path)
        header = one.header
        if header.rank != rank or (header.ranks, header.programs, header.origin) != (
            first.header.ranks,
            first.header.programs,
            first.header.origin,
        ):
            raise BackendError(f"{path} is not of the plan that {file_name(0)} is of")
        found.append(one)
    return tuple(found)


def read_pass(path: Path) -> fx.GraphModule:
    """The graph in a rank file, with its weights.

    Raises:
        BackendError: It cannot be read.
    """
    module = read_program(path).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def with_written(folder: Path, ranks: Sequence[RankGraphs]) -> tuple[RankGraphs, ...]:
    """The graphs of all ranks with those of a folder's files in their places.

    Args:
        folder: Rank files, whose descriptions are those of the same programs.
        ranks: What the programs give.

    Raises:
        BackendError: A file cannot be read, or takes or gives other values.
    """
    return tuple(
        replace(
            one,
            forward=_written(folder, one.rank, "forward", one.forward),
            backward=_written(folder, one.rank, "backward", one.backward) if one.backward else None,
        )
        for one in ranks
    )


def _written(folder: Path, rank: int, which: str, one: PassGraph) -> PassGraph:
    path = folder / file_name(rank, which)
    found = read_rank_file(path)
    if (found.header.rank, found.which) != (rank, which):
        raise BackendError(f"{path} is the {found.which} pass of rank {found.header.rank}")
    if (found.arguments, found.results) != (one.arguments, one.results):
        raise BackendError(f"{path} takes or gives other values than the plan's program")
    return replace(one, module=read_pass(path))
