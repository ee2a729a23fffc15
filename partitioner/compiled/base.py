"""What every compilation has: a graph, a cluster, a plan, and its figures."""

from __future__ import annotations

import html
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from partitioner.compiled.folder import ResultError
from partitioner.compiled.summary import certificate_line
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.schedule import Schedule, schedule
from partitioner.cost_model.simulate import simulate, timeline_json
from partitioner.files import replace_directory
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.program import Programs
from partitioner.lowering import lower
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.verify.compare import Verification


@dataclass(frozen=True, repr=False, kw_only=True)
class Planned(ABC):
    """A plan with everything made from it.

    Attributes:
        cluster: What it was planned for.
        plan: The decisions.
        evaluation: The referee's figures.
        summary: The facts that ``--json`` prints.
        seconds: Seconds that each stage of the compilation took.
        warnings: What is wrong with a saved compilation, one line each, though it can be used.
    """

    cluster: Cluster
    plan: Plan
    evaluation: Evaluation
    summary: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        certificate = self.plan.certificate
        how = certificate_line(certificate) if certificate else "plan without a certificate"
        return f"<{type(self).__name__} {self.graph.name!r} on {self.cluster.name}: {how}>"

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The traced graph."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @property
    def model_path(self) -> Path | None:
        """The model's file, which nothing may overwrite; None if there is none."""
        return None

    @property
    def objective(self) -> str:
        """What the plan was searched for; "throughput" for a plan written by hand."""
        certificate = self.plan.certificate
        return certificate.objective if certificate else "throughput"

    @property
    def search_s(self) -> float | None:
        """Seconds that the search took; None where that is not known."""
        return self.seconds.get("searching")

    @property
    def cost(self) -> float:
        """The plan's cost by its objective: seconds, or bytes for "memory"."""
        return self.evaluation.cost(self.objective)

    @cached_property
    def schedule(self) -> Schedule:
        """Tasks in the global order.

        Raises:
            ResultError: The plan is for more devices than tasks are listed for.
        """
        check_explicit(self.cluster)
        return schedule(self.graph, resolve(self.graph, self.plan), self.cluster)

    @cached_property
    def programs(self) -> Programs:
        """One program a rank.

        Raises:
            ResultError: As `schedule`.
        """
        return lower(self.graph, self.schedule, len(self.cluster))

    @abstractmethod
    def verify(self, seed: int = 0) -> Verification:
        """Compare all ranks with the whole model on random inputs."""

    @abstractmethod
    def verify_written(self, folder: Path, seed: int = 0) -> Verification:
        """Compare the rank files of a folder that this was saved to with the whole model."""

    @abstractmethod
    def _write_source(self, folder: Path, final: Path) -> None:
        """Write `request.json` into `folder`, which will be moved to `final`."""

    @abstractmethod
    def _write_ranks(self, folder: Path) -> None:
        """Write the rank files."""

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
            BackendError: A rank's program cannot be written as a file.
        """
        target = Path(directory)

        def write(folder: Path) -> None:
            (folder / "plan.json").write_text(self.plan.to_json())
            (folder / "summary.json").write_text(
                _pretty({**self.summary, "seconds": dict(self.seconds)})
            )
            self._write_source(folder, target)
            if len(self.cluster) > MOST_EXPLICIT:
                return
            (folder / "timeline.json").write_text(timeline_json(simulate(self.schedule)))
            if progress is not None:
                progress("drawing the report")
            (folder / "report.html").write_text(self._page(), encoding="utf-8")
            if not plan_only:
                self._write_ranks(folder)

        replace_directory(target, write, force=force)
        return target

    def report(self, path: str | Path) -> Path:
        """Write the report: one HTML file that shows the plan and needs no network.

        Args:
            path: File to write; one that is there is replaced.

        Raises:
            FileError: It cannot be written, or is the model itself.
        """
        from partitioner.files import check_file, refuse_to_replace, write_file

        target = Path(path)
        check_file(target)
        if self.model_path is not None:
            refuse_to_replace(self.model_path, target)
        write_file(target, self._page().encode())
        return target

    def _page(self) -> str:
        from partitioner.report.page.data import report_data
        from partitioner.report.page.page import render

        return render(report_data(self))

    def _repr_html_(self) -> str:
        """The report in a notebook's cell, in a frame of its own."""
        page = html.escape(self._page(), quote=True)
        box = "width: 100%; height: 720px; border: 1px solid #8888"
        allowed = "allow-scripts allow-downloads"
        return f'<iframe srcdoc="{page}" sandbox="{allowed}" style="{box}"></iframe>'


def _pretty(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def check_explicit(cluster: Cluster) -> None:
    """Refuse clusters whose devices are only planned for together.

    Raises:
        ResultError: There are more than `MOST_EXPLICIT` devices.
    """
    if len(cluster) > MOST_EXPLICIT:
        raise ResultError(
            f"the plan is for {len(cluster)} devices: programs, schedules and reports are made for "
            f"up to {MOST_EXPLICIT} devices; plan.json and summary.json say all there is"
        )
