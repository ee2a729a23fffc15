"""Are the rank files of a saved compilation up to date? Asked before they are run or verified."""

from __future__ import annotations

from pathlib import Path

from partitioner.backends.onnx.load import read_directory
from partitioner.directory import DirectoryError
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan


def check_rank_files(folder: Path, plan: Plan, graph: Graph | None = None) -> None:
    """Refuse rank files that are not what the folder's plan and model would give.

    Args:
        folder: A saved compilation.
        plan: What its plan.json holds.
        graph: Its model, to compare the weights too: all of them are read.

    Raises:
        DirectoryError: There are no rank files, they were made from another plan, or they hold
            other weights; it names the file and says what to do.
        BackendError: A rank file is missing or wrong, or the files disagree.
    """
    if not (folder / "rank0.onnx").is_file():
        raise DirectoryError(f"{folder} holds a plan only; partition again without --plan-only")
    for header in read_directory(folder):
        if header.origin.plan != plan.digest:
            raise DirectoryError(
                f"{folder}: rank{header.rank}.onnx is not of its plan.json, which was edited; "
                f"write it anew: partition MODEL --constraints {folder / 'plan.json'} -o {folder} "
                "--force (and the options of before)"
            )
        if graph is not None and header.origin.weights != graph.weights_digest:
            raise DirectoryError(
                f"{folder}: rank{header.rank}.onnx holds other weights than its model, which has "
                "changed since; partition it again"
            )
