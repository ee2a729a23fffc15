"""A rank's passes as exported programs: ``rank0.pt2`` and, in training, ``rank0.backward.pt2``.

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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import Header, Origin, count, header_data, parse_header, text
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.archive import read_extra, read_program
from partitioner.backends.torch.emit import PassGraph, RankGraphs
from partitioner.backends.torch.groups import group_ranks
from partitioner.ir.errors import IRError
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType

#: Name of the description in an archive.
EXTRA = "partitioner.json"
#: Version of the contents of rank files; files of another version are refused.
FORMAT_VERSION = 1
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class RankFile:
    """The description in a rank file.

    Attributes:
        header: The part that rank files of all backends have.
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


def write_rank(folder: Path, programs: Programs, graphs: RankGraphs, origin: Origin) -> None:
    """Write the files of a rank.

    Args:
        origin: Digests of the plan and weights that they were made from.

    Raises:
        BackendError: PyTorch cannot export a graph.
    """
    program = programs.ranks[graphs.rank]
    common = header_data(program, programs, len(program.comms), origin)
    common["groups"] = group_ranks(programs)
    common["stored"] = graphs.stored
    common["training"] = graphs.backward is not None
    for which, graph, examples in _passes(graphs):
        data = {"version": FORMAT_VERSION, **common, "pass": which}
        data |= {"arguments": graph.arguments, "results": graph.results}
        _write(folder / file_name(graphs.rank, which), graph.module, examples, data)


def _passes(graphs: RankGraphs) -> Iterator[tuple[str, PassGraph, tuple[Tensor, ...]]]:
    """The passes, each with empty arguments of the sizes and strides of a run."""
    forward, backward = graphs.forward, graphs.backward
    arguments = tuple(_empty(graphs.types[name]) for name in forward.arguments)
    yield "forward", forward, arguments
    if backward is None:
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = forward.module(*map(mode.from_tensor, arguments))
    results = dict(zip(forward.results, fakes, strict=True))
    yield (
        "backward",
        backward,
        tuple(_empty(graphs.types[name], results.get(name)) for name in backward.arguments),
    )


def _empty(tensor_type: TensorType, like: Tensor | None = None) -> Tensor:
    """A tensor with the strides of another one; contiguous without."""
    strides = (torch.empty(tensor_type.shape, device="meta") if like is None else like).stride()
    return torch.empty_strided(tensor_type.shape, strides, dtype=torch_dtype(tensor_type.dtype))


def _write(
    path: Path, module: fx.GraphModule, examples: tuple[Tensor, ...], data: Mapping[str, Any]
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
    """The description in a rank file; its graph and weights are not read.

    Raises:
        BackendError: The file is no rank file, or one of another version.
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


def read_pass(path: Path) -> fx.GraphModule:
    """The graph in a rank file, with its weights.

    Raises:
        BackendError: The file cannot be read.
    """
    module = read_program(path).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def with_written(folder: Path, ranks: Sequence[RankGraphs]) -> tuple[RankGraphs, ...]:
    """The graphs of all ranks, replaced by those in a folder's files.

    Raises:
        BackendError: A file cannot be read, or takes or gives other values.
    """
    return tuple(
        replace(
            graphs,
            forward=_with_file(folder, graphs.rank, "forward", graphs.forward),
            backward=graphs.backward
            and _with_file(folder, graphs.rank, "backward", graphs.backward),
        )
        for graphs in ranks
    )


def _with_file(folder: Path, rank: int, which: str, graph: PassGraph) -> PassGraph:
    path = folder / file_name(rank, which)
    file = read_rank_file(path)
    if (file.header.rank, file.which) != (rank, which):
        raise BackendError(f"{path} is the {file.which} pass of rank {file.header.rank}")
    if (file.arguments, file.results) != (graph.arguments, graph.results):
        raise BackendError(f"{path} takes or gives other values than the plan's program")
    return replace(graph, module=read_pass(path))
