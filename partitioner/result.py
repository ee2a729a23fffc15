"""A compiled model: run it, verify it, save it, load it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.schedule import Schedule, schedule
from partitioner.cost_model.simulate import simulate, timeline_json
from partitioner.directory import replace_directory
from partitioner.frontends.onnx import Traced, load_onnx
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.program import Programs
from partitioner.lowering import lower
from partitioner.summary import certificate_line
from partitioner.verification import Verification, verify

if TYPE_CHECKING:
    import onnx

SOURCE_VERSION = 1


class ResultError(PartitionerError, ValueError):
    """A directory that is not a saved compilation, or whose model has moved or changed."""


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


@dataclass(frozen=True, repr=False)
class Compiled:
    """A plan with everything made from it.

    Attributes:
        traced: The graph and the whole model.
        source: Where it came from.
        cluster: What it was planned for.
        plan: The decisions.
        evaluation: The referee's figures.
        schedule: Tasks in the global order.
        programs: One program a rank.
        summary: The facts that ``--json`` prints.
        seconds: Seconds that each stage of the compilation took.
    """

    traced: Traced
    source: Source
    cluster: Cluster
    plan: Plan
    evaluation: Evaluation
    schedule: Schedule
    programs: Programs
    summary: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        certificate = self.plan.certificate
        how = certificate_line(certificate) if certificate else "plan without a certificate"
        return f"<Compiled {self.graph.name!r} on {self.cluster.name}: {how}>"

    @property
    def graph(self) -> Graph:
        """The traced graph."""
        return self.traced.graph

    @property
    def cost(self) -> float:
        """The plan's cost by its objective: seconds, or bytes for "memory"."""
        certificate = self.plan.certificate
        return self.evaluation.cost(certificate.objective if certificate else "throughput")

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

        return dict(run_lockstep(self._emitted, dict(inputs)))

    def verify(self, seed: int = 0) -> Verification:
        """Compare all ranks with the whole model on random valid inputs."""
        return verify(self.traced, self.programs, self._emitted, seed)

    def save(self, directory: str | Path, *, force: bool = False, plan_only: bool = False) -> Path:
        """Write the plan, the rank files and the timeline; all of it or nothing.

        Args:
            directory: Folder to make.
            force: Replace the folder if it is there.
            plan_only: Leave the rank files out.

        Raises:
            DirectoryError: The folder is there and `force` is not set, or cannot be written.
        """
        from partitioner.backends.onnx.emit import emit

        target = Path(directory)

        def write(folder: Path) -> None:
            (folder / "plan.json").write_text(self.plan.to_json())
            (folder / "summary.json").write_text(
                _pretty({**self.summary, "seconds": dict(self.seconds)})
            )
            (folder / "timeline.json").write_text(timeline_json(simulate(self.schedule)))
            self.source.write(folder, target)
            if not plan_only:
                emit(self.programs, self.graph, folder)

        replace_directory(target, write, force=force)
        return target


def load(directory: str | Path) -> Compiled:
    """A saved compilation.

    Args:
        directory: What `Compiled.save` or ``partition MODEL`` wrote.

    Raises:
        ResultError: Not such a folder, or the model is gone or has changed.
        PlanError: The plan was edited into something that does not fit the model.
    """
    folder = Path(directory)
    data = _read_request(folder)
    traced = load_graph(folder)
    plan = Plan.from_json(_read(folder, "plan.json"))
    cluster = Cluster.from_data(plan.cluster)
    evaluation = evaluate(traced.graph, plan, cluster)
    tasks = schedule(traced.graph, resolve(traced.graph, plan), cluster)
    return Compiled(
        traced=traced,
        source=Source(
            (folder / data["model"]).resolve(),
            None,
            traced.graph.digest,
            data["dims"],
            _shapes(data),
        ),
        cluster=cluster,
        plan=plan,
        evaluation=evaluation,
        schedule=tasks,
        programs=lower(traced.graph, tasks, len(cluster)),
        summary=_read_object(folder, "summary.json"),
    )


def load_graph(folder: Path) -> Traced:
    """The model that a saved compilation is of.

    Raises:
        ResultError: See `load`.
    """
    data = _read_request(folder)
    model = (folder / data["model"]).resolve()
    if not model.is_file():
        raise ResultError(f"{folder}: its model {model} is gone; move it back or partition again")
    traced = load_onnx(model, data["dims"], _shapes(data))
    if traced.graph.digest != data["graph_digest"]:
        raise ResultError(f"{folder}: its model {model} has changed since; partition it again")
    return traced


def _shapes(data: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in data["shapes"].items()}


def _read_request(folder: Path) -> dict[str, Any]:
    data = _read_object(folder, "request.json")
    if data.get("version") != SOURCE_VERSION:
        raise ResultError(
            f"{folder}: request.json is version {data.get('version')!r}, not {SOURCE_VERSION}"
        )
    for key, kind in (("model", str), ("graph_digest", str), ("dims", dict), ("shapes", dict)):
        if not isinstance(data.get(key), kind):
            raise ResultError(f"{folder}: request.json has {key} = {data.get(key)!r}")
    return data


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ResultError(
            f"{folder} is not a folder that `partition MODEL` wrote: no readable {name}"
        ) from None


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    text = _read(folder, name)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ResultError(f"{folder}: {name} is not a JSON object")
    return data


def _pretty(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
