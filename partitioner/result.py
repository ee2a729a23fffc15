"""A compiled model: run it, verify it, save it, load it."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioner.backends.errors import BackendError
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.simulate import simulate, timeline_json
from partitioner.directory import replace_directory
from partitioner.frontends.onnx import Traced, load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Certificate
from partitioner.limits import MOST_EXPLICIT
from partitioner.planned import Planned, check_explicit
from partitioner.saved import (
    SOURCE_VERSION,
    ResultError,
    load_plan,
    load_request,
    load_summary,
)
from partitioner.verification import Verification, verify

if TYPE_CHECKING:
    import onnx

#: Relative difference of two sums of one plan's costs that is rounding.
COST_TOLERANCE = 1e-9


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

    def save(
        self,
        directory: str | Path,
        *,
        force: bool = False,
        plan_only: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> Path:
        """Write the plan, the rank files and the timeline; all of it or nothing.

        On more than `MOST_EXPLICIT` devices the plan and its summary alone are written, and the
        summary's notes say so.

        Args:
            directory: Folder to make.
            force: Replace the folder if it is there.
            plan_only: Leave the rank files out.
            progress: Called with a line of text where a stage may take long.

        Raises:
            DirectoryError: The folder is there and `force` is not set, it is not one of ours, or it
                cannot be written.
            BackendError: A rank's program cannot be written as an ONNX file.
        """
        from partitioner.backends.header import Origin
        from partitioner.backends.onnx.emit import emit

        target = Path(directory)

        def write(folder: Path) -> None:
            (folder / "plan.json").write_text(self.plan.to_json())
            (folder / "summary.json").write_text(
                _pretty({**self.summary, "seconds": dict(self.seconds)})
            )
            self.source.write(folder, target)
            if len(self.cluster) > MOST_EXPLICIT:
                return
            (folder / "timeline.json").write_text(timeline_json(simulate(self.schedule)))
            if progress is not None:
                progress("drawing the report")
            (folder / "report.html").write_text(self._page(), encoding="utf-8")
            if not plan_only:
                origin = Origin(self.plan.digest, self.graph.weights_digest)
                emit(self.programs, self.graph, folder, origin)

        replace_directory(target, write, force=force)
        return target


def _by_name(inputs: object, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not isinstance(inputs, Mapping):
        known = ", ".join(map(repr, names))
        raise BackendError(
            f"inputs is a {type(inputs).__name__}, not a dict of arrays by name ({known})"
        )
    return dict(inputs)


def load(directory: str | Path) -> Compiled:
    """A saved compilation; its plan may have been edited.

    The rank files are not looked at: `run` and `verify` of the result make their own, with the
    weights that the model has now. ``partition run`` and ``partition verify`` use the files, and
    refuse those that are not of the plan (and, for verify, of the model's weights).

    Args:
        directory: What `Compiled.save` or ``partition MODEL`` wrote.

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
    request = load_request(folder)
    traced = load_graph(folder)
    plan = load_plan(folder)
    cluster = Cluster.from_data(plan.cluster)
    check_explicit(cluster)
    evaluation = evaluate(traced.graph, plan, cluster)
    summary = load_summary(folder)
    warnings = tuple(_stale(folder, plan.certificate, evaluation))
    if warnings:
        plan = replace(plan, certificate=None)
    return Compiled(
        traced=traced,
        source=Source(request.model, None, traced.graph.digest, request.dims, request.shapes),
        cluster=cluster,
        plan=plan,
        evaluation=evaluation,
        summary=summary,
        seconds=summary["seconds"],
        warnings=warnings,
    )


def _stale(folder: Path, cert: Certificate | None, found: Evaluation) -> Iterator[str]:
    """Says that a certificate is not of the plan that it stands in, if so."""
    if cert is None:
        return
    cost = found.cost(cert.objective)
    if not math.isclose(cost, cert.cost, rel_tol=COST_TOLERANCE):
        yield (
            f"{folder}: the certificate in plan.json is left out: it says {cert.objective} cost "
            f"{cert.cost:.6g}, but the plan costs {cost:.6g}; it was edited, or made by another "
            "version"
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


def _pretty(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
