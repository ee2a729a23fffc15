"""A compiled model: run it, verify it, save it, load it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioner.backends.errors import BackendError
from partitioner.compiled.base import Planned
from partitioner.compiled.folder import SOURCE_VERSION, ResultError, load_kind, load_request
from partitioner.compiled.reload import stored_plan
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.ir.graph import Graph
from partitioner.verify.compare import Verification
from partitioner.verify.onnx_model import verify

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.compiled.module import ModuleProgram


@dataclass(frozen=True)
class Source:
    """Where a graph came from, so that a saved compilation finds its model again.

    Attributes:
        path: Model file; None if the model was given in memory (it is then saved along).
        proto: The model in memory.
        digest: Digest of the traced graph.
        dims: Sizes bound to symbols.
        shapes: Shapes bound to inputs.
    """

    path: Path | None
    proto: onnx.ModelProto | None
    digest: str
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        model: str | Path | onnx.ModelProto,
        graph: Graph,
        dims: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> Source:
        """The source of a graph that was just traced."""
        if isinstance(model, str | Path):
            return cls(Path(model).resolve(), None, graph.digest, dims, shapes)
        return cls(None, model, graph.digest, dims, shapes)

    def write(self, directory: Path, final: Path) -> None:
        """Write `request.json` into `directory`, which will be moved to `final`."""
        name = "model.onnx"
        if self.path is not None:
            name = os.path.relpath(self.path, final.resolve())
        elif self.proto is not None:
            (directory / name).write_bytes(self.proto.SerializeToString())
        data = {
            "version": SOURCE_VERSION,
            "model": name,
            "graph_digest": self.digest,
            "dims": dict(self.dims),
            "shapes": {key: list(shape) for key, shape in self.shapes.items()},
        }
        (directory / "request.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True, repr=False, kw_only=True)
class Compiled(Planned):
    """An ONNX model with its plan and everything made from it.

    Attributes:
        traced: The graph and the whole model.
        source: Where it came from.
    """

    traced: Traced
    source: Source

    @property
    def graph(self) -> Graph:
        """The traced graph."""
        return self.traced.graph

    @property
    def name(self) -> str:
        """The model file's name without its suffix, or the graph's if there is no file."""
        return self.source.path.stem if self.source.path is not None else self.graph.name

    @property
    def model_path(self) -> Path | None:
        """The model's file, if it was given as one."""
        return self.source.path

    @cached_property
    def _emitted(self) -> Path:
        """Rank files in a private folder that goes with this object."""
        from partitioner.backends.onnx.emit import emit

        folder = Path(tempfile.mkdtemp(prefix="partitioner-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        emit(self.programs, self.graph, folder)
        return folder

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run all ranks in this process, in lock-step over simulated communications.

        Args:
            inputs: Whole inputs by name; bfloat16 and float8 as arrays of ml_dtypes' types.

        Returns:
            Whole outputs by name.

        Raises:
            BackendError: An input is missing, unknown, or of the wrong shape or type, or an
                input or output is of 4-bit elements.
        """
        from partitioner.backends.simulator import run_lockstep

        return dict(run_lockstep(self._emitted, _by_name(inputs, self.graph.inputs)))

    def verify(self, seed: int = 0) -> Verification:
        """Compare all ranks with the whole model on random valid inputs.

        Args:
            seed: Of the inputs.

        Returns:
            What was found, true where all outputs are equal. A difference is no exception.

        Raises:
            VerificationError: It would not fit this machine's free memory.
            BackendError: A rank fails.
        """
        return verify(self.traced, self.programs, self._emitted, seed)

    def verify_written(self, folder: Path, seed: int = 0) -> Verification:
        """Compare the rank files of a folder that this was saved to with the whole model.

        Raises:
            DirectoryError: There are no rank files, they are of another plan, or they hold other
                weights than the model.
            BackendError: A rank file is wrong, or a rank fails.
            VerificationError: It would not fit this machine's free memory.
        """
        from partitioner.compiled.rank_files import OnnxFiles

        OnnxFiles(folder).check(self.plan, self.graph)
        return verify(self.traced, self.programs, folder, seed)

    def _write_source(self, folder: Path, final: Path) -> None:
        self.source.write(folder, final)

    def _write_ranks(self, folder: Path) -> None:
        from partitioner.backends.header import Origin
        from partitioner.backends.onnx.emit import emit

        emit(self.programs, self.graph, folder, Origin(self.plan.digest, self.graph.weights_digest))


def _by_name(inputs: object, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not isinstance(inputs, Mapping):
        known = ", ".join(map(repr, names))
        raise BackendError(
            f"inputs is a {type(inputs).__name__}, not a dict of arrays by name ({known})"
        )
    return dict(inputs)


def load(
    directory: str | Path, module: nn.Module | None = None, example_inputs: Any = None
) -> Compiled | ModuleProgram:
    """A saved compilation; its plan may have been edited.

    The rank files are not looked at: what the result runs and verifies it makes anew, with the
    weights that the model has now. ``partition run`` and ``partition verify`` use the files, and
    refuse those that are not of the plan (and, for verify, of the model's weights).

    A PyTorch module is traced again: read from its ``.pt2`` file, made by its
    ``package.module:factory`` (which is the model's own code, and runs), or given here.

    Args:
        directory: What `save` or ``partition MODEL`` wrote.
        module: The PyTorch module that was compiled, if it was given in Python.
        example_inputs: As in `partitioner.compile`, if `module` is given.

    Returns:
        The compilation. Its plan has no certificate if the stored one is not of this plan, and
        `warnings` says so.

    Raises:
        ResultError: Not such a folder, the model is gone, or its structure, types or small
            constants have changed.
        FrontendError: The model cannot be read.
        PlanError: The plan was edited into something that does not fit the model.
        CostError: Its cluster is none, or lacks a device that the plan uses.
    """
    folder = Path(directory)
    if load_kind(folder) == "module":
        from partitioner.compiled.load_module import load_program

        return load_program(folder, module, example_inputs)
    if module is not None:
        raise ResultError(f"{folder} is of an ONNX model, which it finds itself: give no module")
    request = load_request(folder)
    traced = load_graph(folder)
    stored = stored_plan(folder, traced.graph)
    return Compiled(
        traced=traced,
        source=Source(request.model, None, traced.graph.digest, request.dims, request.shapes),
        **stored.parts,
    )


def load_graph(folder: Path) -> Traced:
    """The model that a saved compilation is of.

    Raises:
        ResultError: See `load`.
        FrontendError: The model cannot be read.
    """
    request = load_request(folder)
    model = request.model
    if not model.is_file():
        raise ResultError(f"{folder}: its model {model} is gone; move it back or partition again")
    traced = load_onnx(model, request.dims, request.shapes)
    if traced.graph.digest != request.graph_digest:
        raise ResultError(f"{folder}: its model {model} has changed since; partition it again")
    return traced


def draw(folder: Path, seed: int) -> Mapping[str, np.ndarray]:
    """Valid random inputs of a saved compilation's model, by name.

    Raises:
        ResultError: The model, which says what is valid, is gone or has changed.
        FrontendError: It cannot be read.
    """
    if load_kind(folder) == "module":
        from partitioner.compiled.load_module import load_program
        from partitioner.verify.module import random_inputs as like_examples

        return like_examples(load_program(folder), seed)
    return random_inputs(load_graph(folder).graph, seed)
