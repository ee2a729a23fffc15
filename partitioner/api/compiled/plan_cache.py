"""Plans of earlier searches, kept in the user's cache folder.

An entry is a small JSON file: a plan as in `plan.json`, and the facts of its summary. Its name is a
digest of what the search depends on: the graph, the request, the cluster with its measurements,
and this package's own source. An entry is trusted as little as a folder that `load` reads: the plan
must be of the graph, fit the cluster and cost what its certificate says, else it is searched anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.api.compiled.folder import checked_summary, is_certified
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.foundations.files import (
    FileError,
    ResultError,
    cache_folder,
    check_no_link,
    read_text,
    write_file,
)
from partitioner.ir.errors import PartitionerError, naming
from partitioner.ir.plan import Plan
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request, StageClock
from partitioner.search.ways.table import Table

if TYPE_CHECKING:
    from partitioner.api.compiled.module_graphs import ModuleGraphs
    from partitioner.api.compiled.onnx_model import OnnxGraphs

#: Names the folder of the plans; `OFF` keeps none.
VARIABLE, OFF = "PARTITIONER_CACHE", "off"
#: Most bytes of all entries, and of one: the entries that were not used for longest go.
MOST_BYTES, MOST_ENTRY = 2**28, 2**26
#: What is said of a plan that no search found now.
FROM_CACHE = (
    "plan and certificate are from the cache, of a search for the same graph, request and cluster; "
    "--no-cache searches anew"
)


@dataclass(frozen=True)
class PlanCache:
    """The entry of a model's graphs, a request and a cluster."""

    graphs: OnnxGraphs | ModuleGraphs
    cluster: Cluster
    request: Request
    clock: StageClock
    folder: Path  #: Where the entries lie; it need not exist.

    @property
    def file(self) -> Path:
        """The file of the entry; it need not exist."""
        profiles = {id(one.profile): one.profile for one in self.cluster.devices}
        profiles |= {id(one.profile): one.profile for one in self.cluster.levels}
        graphs = [*self.graphs.identity, *self.graphs.notes]
        known = [graphs, _source(), self.request, self.cluster.to_data()]
        text = json.dumps(_plain([*known, list(profiles.values())]))
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def read(self) -> tuple[Outcome, Mapping[str, Any]] | None:
        """The plan of the entry and the facts of its summary; None if it holds none that is right.

        What a file holds instead, it is told to the clock.
        """
        file = self.file
        try:
            text = read_text(file, MOST_ENTRY)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._refuse(file, str(error))
            return None
        with self.clock("reading the plan from the cache"):
            try:
                with naming("its plan", ResultError):
                    return self._checked(file, text)
            except PartitionerError as error:
                self._refuse(file, str(error))
                return None

    def _refuse(self, file: Path, why: str) -> None:
        self.clock.say(f"searching anew: {file.name} of the cache is not used: {why}")

    def _checked(self, file: Path, text: str) -> tuple[Outcome, Mapping[str, Any]]:
        data = json.loads(text)
        plan, summary = Plan.from_json(json.dumps(data["plan"])), data["summary"]
        checked_summary(file, {**summary, "seconds": {}})
        if plan.certificate is None or plan.certificate.objective != self.request.objective:
            raise ResultError("it has no certificate of the objective")
        if plan.cluster != json.loads(json.dumps(self.cluster.to_data())):
            raise ResultError("it is of another cluster")
        self._check_micro_batches(plan)
        graph = self.graphs.graph_of(plan)
        if graph.digest != plan.graph_digest:
            raise ResultError("it is of another graph")
        evaluation = evaluate(graph, plan, self.cluster)
        if not evaluation.fits_exactly:
            raise ResultError("it does not fit the cluster's memory")
        if not is_certified(plan.certificate, self.cluster, evaluation):
            raise ResultError("it costs something else than its certificate says")
        with suppress(OSError):
            os.utime(file)  # it was used
        notes = [*summary["notes"], FROM_CACHE]
        return Outcome(graph, plan, evaluation, (), ()), {**summary, "notes": notes}

    def _check_micro_batches(self, plan: Plan) -> None:
        """Refuse a number of micro-batches that nobody asked for and nothing proves to be right."""
        if plan.micro_batches is None or self.request.micro_batches is not None:
            return
        table = Table(self.graphs, self.cluster, self.request, self.clock)
        if why := table.why_not_in(plan.micro_batches):
            raise ResultError(f"{plan.micro_batches} micro-batches: {why}")

    def write(self, plan: Plan, summary: Mapping[str, Any]) -> None:
        """Keep a plan and its facts, in one step; a folder that cannot be written is told."""
        file = self.file
        data = {"plan": json.loads(plan.to_json()), "summary": summary}
        text = json.dumps(data, indent=1).encode()
        if len(text) > MOST_ENTRY:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_no_link(file)
            write_file(file, text)
            _make_room(self.folder)
        except (FileError, OSError) as error:
            self.clock.say(f"the plan is not kept in the cache: {error}")


def plans_folder() -> Path | None:
    """The folder that the environment names for plans; None if none are to be kept."""
    named = os.environ.get(VARIABLE, "")
    if named == OFF:
        return None
    if named:
        return Path(named)
    try:
        return cache_folder() / "plans"
    except RuntimeError:  # there is no home
        return None


def _make_room(folder: Path) -> None:
    """Remove the entries that were not used for longest, beyond `MOST_BYTES`; no other files."""
    kept: list[tuple[float, int, Path]] = []
    for path in filter(_is_entry, folder.glob("*.json")):
        with suppress(FileNotFoundError):  # another process removed it
            status = path.lstat()
            kept.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size


def _is_entry(path: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", path.stem) is not None


@cache
def _source() -> str:
    """A digest of this package's source: another version may find other plans."""
    digest = hashlib.sha256()
    folders: list[Traversable] = [resources.files("partitioner")]
    while folders:
        for entry in sorted(folders.pop().iterdir(), key=lambda one: one.name):
            if entry.is_dir() and entry.name != "__pycache__":
                folders.append(entry)
            elif entry.name.endswith((".py", ".toml")):
                digest.update(entry.name.encode() + b"\0" + entry.read_bytes() + b"\0")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A value as JSON that is the same in every process, and another for another value."""
    if isinstance(value, Plan):
        return value.to_json()
    if is_dataclass(value):
        named = [[one.name, _plain(getattr(value, one.name))] for one in fields(value)]
        return [type(value).__name__, named]
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else repr(value)
