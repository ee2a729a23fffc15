"""The rank files of a saved compilation: which format they have, whether they are up to date."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from partitioner.backends.header import Header
from partitioner.backends.optimization import DEFAULT, Optimization
from partitioner.foundations.files import DirectoryError
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan

if TYPE_CHECKING:
    from partitioner.backends.launch import LocalRun


@dataclass(frozen=True)
class RankFiles(ABC):
    """The rank files in the folder of a saved compilation."""

    folder: Path
    #: Type of the device that each rank of a module runs on, "cpu" or "cuda"; ranks of ONNX models
    #: choose theirs.
    device: str = "cpu"
    #: Level of ONNX Runtime's optimizations, of ranks of ONNX models.
    optimization: Optimization = DEFAULT
    suffix: ClassVar[str]

    @abstractmethod
    def headers(self) -> Sequence[Header]:
        """The header of each file, in order of rank.

        Raises:
            BackendError: A file is missing or wrong, or they disagree.
        """

    @property
    @abstractmethod
    def needs_model(self) -> bool:
        """Tell whether files run only with values of the model: weights in training, buffers."""

    @abstractmethod
    def run(self, inputs: Mapping[str, np.ndarray], requests: int, steps: int = 0) -> LocalRun:
        """Run the files on this machine, one process a rank.

        Args:
            inputs: Whole inputs by name.
            requests: Number of requests of a run without recording.
            steps: Steps of one request each that are recorded before; 0 for none.

        Raises:
            BackendError: An input is wrong, or a rank failed.
        """

    def check(self, plan: Plan, graph: Graph | None = None) -> None:
        """Refuse files that are not of the plan and, if the model's graph is given, of its weights.

        Raises:
            DirectoryError: There are no rank files, they are of another plan, or they hold other
                weights; the message names the file and a remedy.
            BackendError: A rank file is missing or wrong, or the files disagree.
        """
        if not (self.folder / f"rank0{self.suffix}").is_file():
            raise DirectoryError(
                f"{self.folder} holds a plan only; partition again without --plan-only"
            )
        for header in self.headers():
            name = f"rank{header.rank}{self.suffix}"
            check_plan(self.folder, header, name, plan)
            if graph is not None and header.origin.weights != graph.weights_digest:
                raise DirectoryError(
                    f"{self.folder}: {name} holds other weights than the model; give the model "
                    "with the weights that were partitioned, or partition it again"
                )


class OnnxFiles(RankFiles):
    """``rank0.onnx``, ..."""

    suffix = ".onnx"
    needs_model = False

    def headers(self) -> Sequence[Header]:
        """See `RankFiles.headers`."""
        from partitioner.backends.onnx.files.load import read_directory

        return read_directory(self.folder)

    def run(self, inputs: Mapping[str, np.ndarray], requests: int, steps: int = 0) -> LocalRun:
        """See `RankFiles.run`."""
        from partitioner.backends.onnx.local import run_local

        return run_local(self.folder, inputs, requests, steps=steps, optimization=self.optimization)


class ModuleFiles(RankFiles):
    """``rank0.pt2``, ..."""

    suffix = ".pt2"

    def headers(self) -> Sequence[Header]:
        """See `RankFiles.headers`."""
        from partitioner.backends.torch.files.rank_files import read_rank_files

        return [file.header for file in read_rank_files(self.folder)]

    @property
    def needs_model(self) -> bool:
        """See `RankFiles.needs_model`."""
        from partitioner.backends.torch.files.rank_files import read_rank_files
        from partitioner.backends.torch.local import needs_values

        return needs_values(read_rank_files(self.folder))

    def run(self, inputs: Mapping[str, np.ndarray], requests: int, steps: int = 0) -> LocalRun:
        """See `RankFiles.run`; requests are run one after the other."""
        from partitioner.backends.torch.local import run_module_files

        return run_module_files(self.folder, inputs, requests, steps=steps, device=self.device)


def check_plan(folder: Path, header: Header, name: str, plan: Plan) -> None:
    """Refuse, as a DirectoryError with a remedy, a rank file that is not of the folder's plan."""
    if header.origin.plan != plan.digest:
        raise DirectoryError(
            f"{folder}: {name} is not of its plan.json, which was edited; write it "
            f"anew: partition MODEL --constraints {folder / 'plan.json'} "
            f"-o {folder} --force (and the options of before)"
        )


def rank_files(folder: Path) -> RankFiles:
    """The rank files of a folder, which need not exist."""
    return ModuleFiles(folder) if has_module_file(folder, 0) else OnnxFiles(folder)


def has_module_file(folder: Path, rank: int) -> bool:
    """Test whether a rank's file in a folder is of a PyTorch module."""
    # A path that is too long is no file to os.path; the reader refuses it with a message.
    return os.path.isfile(folder / f"rank{rank}.pt2")  # noqa: PTH113
