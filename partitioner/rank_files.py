"""Are the rank files of a saved compilation up to date? Asked before they are run or verified."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from partitioner.backends.header import Header
from partitioner.directory import DirectoryError
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan


def check_rank_files(folder: Path, plan: Plan, graph: Graph | None = None) -> None:
    """Refuse rank files of an ONNX model that are not what the folder's plan and model would give.

    Args:
        folder: A saved compilation.
        plan: What its plan.json holds.
        graph: Its model, to compare the weights too: all of them are read.

    Raises:
        DirectoryError: There are no rank files, they were made from another plan, or they hold
            other weights; it names the file and says what to do.
        BackendError: A rank file is missing or wrong, or the files disagree.
    """
    from partitioner.backends.onnx.load import read_directory

    _check_there(folder, "rank0.onnx")
    _check_origin(folder, ".onnx", read_directory(folder), plan, graph)


def check_module_files(folder: Path, plan: Plan, graph: Graph | None = None) -> None:
    """The same for the rank files of a PyTorch module (see `check_rank_files`)."""
    from partitioner.backends.torch.rank_files import read_rank_files

    _check_there(folder, "rank0.pt2")
    headers = [one.header for one in read_rank_files(folder)]
    _check_origin(folder, ".pt2", headers, plan, graph)


def _check_there(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise DirectoryError(f"{folder} holds a plan only; partition again without --plan-only")


def _check_origin(
    folder: Path, suffix: str, headers: Iterable[Header], plan: Plan, graph: Graph | None
) -> None:
    for header in headers:
        name = f"rank{header.rank}{suffix}"
        if header.origin.plan != plan.digest:
            raise DirectoryError(
                f"{folder}: {name} is not of its plan.json, which was edited; "
                f"write it anew: partition MODEL --constraints {folder / 'plan.json'} -o {folder} "
                "--force (and the options of before)"
            )
        if graph is not None and header.origin.weights != graph.weights_digest:
            raise DirectoryError(
                f"{folder}: {name} holds other weights than its model, which has "
                "changed since; partition it again"
            )
