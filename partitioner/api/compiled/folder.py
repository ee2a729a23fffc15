"""The files of a saved compilation: JSON, which is checked as it is read, and those of ranks.

This module loads no framework and no solver.
"""

from __future__ import annotations

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from partitioner.backends.header import Header
from partitioner.backends.optimization import DEFAULT, Optimization
from partitioner.cost_model.cluster.launches import launches
from partitioner.cost_model.executors import MOST_RANKS
from partitioner.foundations.files import DirectoryError, ResultError, read_text
from partitioner.frontends.inputs import InputRange
from partitioner.frontends.torch.options import AtRest
from partitioner.ir.checks import fits
from partitioner.ir.graph import Graph
from partitioner.ir.graph_data import GraphDataError, graph_data, graph_of, type_data, type_of
from partitioner.ir.nodes.feeds import Feed
from partitioner.ir.nodes.loads import Loads
from partitioner.ir.plan import Certificate, Objective, Plan, PlanError, Status, Trial
from partitioner.report.delivery import Delivery
from partitioner.report.one_device import OneDevice
from partitioner.report.schema import Space
from partitioner.report.verdict import Rival

if TYPE_CHECKING:
    from partitioner.backends.launch import LocalRun
    from partitioner.cost_model.cluster.topology import Cluster
    from partitioner.cost_model.evaluate import Evaluation

SOURCE_VERSION = 1
#: Largest relative difference of a plan's recomputed cost from the stored one: rounding.
COST_TOLERANCE = 1e-9
#: Name of the file of the plan's graph, which is looked at without a model.
GRAPH_FILE, GRAPH_VERSION = "graph.json", 1
#: Name of the file of a module's example inputs, by name of the graph's inputs.
EXAMPLES = "inputs.npz"
_WRITTEN = re.compile(
    r"(plan|summary|request|graph|timeline|measured)\.json|report\.html|model\.onnx|inputs\.npz"
    r"|rank\d+\.(onnx|weights|pt2|[a-z_0-9]+\.pt2)"
)


def is_written(name: str) -> bool:
    """Test whether a saved compilation writes a file of this name."""
    return _WRITTEN.fullmatch(name) is not None


@dataclass(frozen=True)
class OnnxRequest:
    """`request.json` of an ONNX model."""

    model: Path  #: The model's file, absolute; it need not exist.
    graph_digest: str
    dims: Mapping[str, int]  #: Sizes of symbolic dims, by symbol.
    shapes: Mapping[str, tuple[int, ...]]  #: Shapes of inputs, by name.
    feed: Feed = field(default_factory=dict)  #: Results that are inputs of the next call.

    def write(self, folder: Path, final: Path) -> None:
        """Write `request.json` into `folder`, which will be moved to `final`."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        model = _relative(self.model, final)
        dims, feed = dict(self.dims), dict(self.feed)
        _write(folder, {**vars(self), "model": model, "dims": dims, "shapes": shapes, "feed": feed})


@dataclass(frozen=True)
class ModuleRequest:
    """`request.json` of a PyTorch module."""

    #: The ``.pt2`` or configuration file, absolute; None if the module came from elsewhere.
    file: Path | None
    factory: str  #: ``package.module:function``, or "": for people, it is never imported.
    graph_digest: str
    call: str  #: The example inputs in words, as `Signature.described` gives them.
    training: bool  #: Whether the backward pass was planned too.
    optimizer: str  #: The optimizer whose memory was counted.
    at_rest: AtRest  #: As of `ModuleOptions`.
    loads: Loads = ()  #: As of `ModuleOptions`.
    dims: Mapping[str, int] = field(default_factory=dict)  #: As of `ModuleSource`.

    def write(self, folder: Path, final: Path) -> None:
        """Write `request.json` into `folder`, which will be moved to `final`."""
        file = _relative(self.file, final)
        _write(folder, {"kind": "module", **vars(self), "file": file, "dims": dict(self.dims)})


def _relative(path: Path | None, folder: Path) -> str:
    return "" if path is None else os.path.relpath(path, folder.resolve())


def _write(folder: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps({"version": SOURCE_VERSION, **data}, indent=1, sort_keys=True)
    (folder / "request.json").write_text(text + "\n")


def load_request(folder: Path) -> OnnxRequest | ModuleRequest:
    """`request.json`; a ResultError if it is missing, of another version or kind, or malformed."""
    data = read_object(folder, "request.json")
    if data.get("version") != SOURCE_VERSION:
        raise ResultError(
            f"{folder}: request.json is version {data.get('version')!r}, not {SOURCE_VERSION}"
        )
    kind = data.get("kind", "onnx")
    if kind == "onnx":
        data = {"feed": {}, **data}  # older folders have no such field
        _check_fields(folder, "request.json", data, _REQUEST)
        try:
            model = folder / data["model"]
            model = model.parent.resolve() / model.name
            model.is_file()  # raises if no file can have this name
        except (OSError, ValueError) as error:
            raise ResultError(
                f"{folder}: request.json has model = {_shown(data['model'])}: {error}"
            ) from None
        shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
        return OnnxRequest(model, data["graph_digest"], data["dims"], shapes, data["feed"])
    if kind != "module":
        raise ResultError(f"{folder}: request.json has kind = {_shown(kind)}")
    data = {"at_rest": "", "loads": [], "dims": {}, **data}  # older folders have no such fields
    _check_fields(folder, "request.json", data, _MODULE)
    return ModuleRequest(
        _path(folder, data["file"]),
        data["factory"],
        data["graph_digest"],
        data["call"],
        data["training"],
        data["optimizer"],
        data["at_rest"],
        tuple((pattern, tuple(map(float, numbers))) for pattern, numbers in data["loads"]),
        data["dims"],
    )


def _path(folder: Path, name: str) -> Path | None:
    """An absolute path; None for ""."""
    if not name:
        return None
    try:
        path = (folder / name).resolve()
        path.exists()  # raises if no file can have this name
    except (OSError, ValueError) as error:
        raise ResultError(f"{folder}: request.json names {_shown(name)}: {error}") from None
    return path


@dataclass(frozen=True)
class GraphFile:
    """`graph.json`: the plan's graph, see `Model`; contents of weights are left out."""

    name: str
    graph: Graph
    ranges: Mapping[str, InputRange]

    def write(self, folder: Path) -> None:
        """Write the file."""
        data = {
            "version": GRAPH_VERSION,
            "name": self.name,
            "delivered": sorted(self.graph.delivered),
            "channels_last": sorted(self.graph.channels_last),
            "ranges": {
                name: [type_data(of.type), None if of.span is None else list(of.span)]
                for name, of in self.ranges.items()
            },
            "graph": graph_data(self.graph),
        }
        (folder / GRAPH_FILE).write_text(json.dumps(data, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, folder: Path, digest: str) -> GraphFile:
        """The file of a graph of this digest; a ResultError if it is missing or wrong."""
        data = read_object(folder, GRAPH_FILE)
        if data.get("version") != GRAPH_VERSION:
            raise ResultError(
                f"{folder}: {GRAPH_FILE} is version {data.get('version')!r}, not {GRAPH_VERSION}"
            )
        try:
            delivered, last = data["delivered"], data.get("channels_last", ())
            graph = graph_of(data["graph"])
            graph = replace(graph, delivered=frozenset(delivered), channels_last=frozenset(last))
            stored = cls(str(data["name"]), graph, _ranges(data["ranges"]))
        except GraphDataError as error:
            raise ResultError(f"{folder}: {GRAPH_FILE}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResultError(f"{folder}: {GRAPH_FILE} is malformed: {error!r}") from None
        known = graph.delivered | graph.channels_last
        if graph.digest != digest or not known <= set(graph.types):
            raise ResultError(
                f"{folder}: {GRAPH_FILE} is not of the graph that request.json is of: it was "
                "changed since; partition again"
            )
        return stored


def _ranges(data: Mapping[str, Any]) -> dict[str, InputRange]:
    ranges = {}
    for name, (type_, span) in data.items():
        if span is not None:
            low, high = span
            if type(low) is not int or type(high) is not int or low >= high:
                raise ValueError(f"range {span} of {name!r}")
            span = low, high
        ranges[name] = InputRange(type_of(type_), span)
    return ranges


def load_plan(folder: Path) -> Plan:
    """`plan.json`, not resolved against its model; a ResultError or PlanError if it is wrong."""
    try:
        return Plan.from_json(_read(folder, "plan.json"))
    except PlanError as error:
        raise PlanError(f"{folder / 'plan.json'}: {error}") from None


def load_summary(folder: Path) -> dict[str, Any]:
    """`summary.json`: what ``--json`` prints, and stages' seconds; a ResultError if it is wrong."""
    return checked_summary(folder, read_object(folder, "summary.json"))


def checked_summary(place: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The facts of a summary as they are stored, from a folder or file; a ResultError if wrong."""
    _check_fields(place, "summary.json", data, _SUMMARY)
    if isinstance(delivery := data.get("delivery"), dict):
        # folders of earlier versions have bytes there, too, which are now in the plan's figures
        names = {one.name for one in fields(Delivery)}
        data["delivery"] = {name: given for name, given in delivery.items() if name in names}
    given = {key: kind for key, kind in _SUMMARY_MAY_HAVE.items() if key in data}
    _check_fields(place, "summary.json", data, given)
    return data


def is_certified(certificate: Certificate, cluster: Cluster, evaluation: Evaluation) -> bool:
    """Test whether a plan costs what its certificate says."""
    cost = evaluation.cost(certificate.objective)
    # of more than `MOST_RANKS` devices the certificate's cost is an upper estimate
    if len(cluster) > MOST_RANKS and certificate.bound <= cost <= certificate.cost:
        return True
    return math.isclose(cost, certificate.cost, rel_tol=COST_TOLERANCE)


def _read(folder: Path, name: str) -> str:
    try:
        return read_text(folder / name)
    except (OSError, ValueError) as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        why = "" if missing else f" ({getattr(error, 'strerror', None) or error})"
        raise ResultError(
            f"{folder} is not a folder that `partition MODEL` wrote: no readable {name}{why}"
        ) from None


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a saved compilation, else a ResultError."""
    text = _read(folder, name)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ResultError(f"{folder}: {name} is not a JSON object")
    return data


def _check_fields(
    folder: Path, name: str, data: Mapping[str, Any], fields: Mapping[str, Any]
) -> None:
    for key, kind in fields.items():
        if key not in data:
            raise ResultError(f"{folder}: {name} has no {key}")
        if not fits(data[key], kind):
            raise ResultError(f"{folder}: {name} has {key} = {_shown(data[key])}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _are_loads(value: Any) -> bool:
    """Test for a pattern and a number for each expert, of which one is more than 0."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    pattern, numbers = value
    return fits(pattern, str) and fits(numbers, list[float]) and any(numbers)


_REQUEST: Mapping[str, Any] = {
    "model": str,
    "graph_digest": str,
    "dims": dict[str, int],
    "shapes": dict[str, list[int]],
    "feed": dict[str, str],
}
_MODULE: Mapping[str, Any] = {
    **dict.fromkeys(("file", "factory", "graph_digest", "call", "optimizer"), str),
    "training": bool,
    "at_rest": AtRest,
    "loads": lambda value: isinstance(value, list) and all(map(_are_loads, value)),
    "dims": dict[str, int],
}
_SUMMARY: Mapping[str, Any] = {
    "objective": Objective,
    "status": Status,
    **dict.fromkeys(("strategy", "searched", "solver", "folded"), str),
    "seed": int,
    "seconds": dict[str, float],
    **dict.fromkeys(("cost", "bound", "gap", "sharded_flops_share"), float),
    "kept_whole": dict[str, int],
    "kept_whole_flops_share": float,
    "one_device": OneDevice,
    "latency_s": float,
    **dict.fromkeys(("throughput_per_s", "speedup", "gain"), float | None),
    **dict.fromkeys(("devices", "devices_used"), int),
    **dict.fromkeys(("nodes", "cut_nodes", "replicated_nodes"), int),
    **dict.fromkeys(("cut_over", "replicated_on"), list[str]),
    "pinned": bool,
    "bound_by": lambda value: (
        fits(value, dict[str, list[int]]) and all(len(ends) % 2 == 0 for ends in value.values())
    ),
    "cost_sources": dict[str, float],
    "cost_error": float,
    "load_s": list[float],
    "peak_bytes": list[int],
    "not_searched": dict[str, str],
    "notes": list[str],
    "fewer_devices": lambda value: (
        value is None
        or (fits(value, dict[str, float]) and value.keys() == {"devices", "cost", "cost_here"})
    ),
}
#: Those that not every plan has, or that folders of earlier versions lack.
_SUMMARY_MAY_HAVE: Mapping[str, Any] = {
    "launches": lambda value: fits(value, dict[str, float]) and value.keys() <= launches().keys(),
    "trials": list[Trial],
    "delivery": Delivery,
    "spaces": list[Space],
    "ruled_out": dict[str, float],
    "alternatives": list[Rival],
}


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
        """The header of each file, in order of rank; a BackendError if one is missing or wrong."""

    @property
    @abstractmethod
    def needs_model(self) -> bool:
        """Tell whether files run only with values of the model: weights in training, buffers."""

    @abstractmethod
    def run(self, inputs: Mapping[str, np.ndarray], requests: int, steps: int = 0) -> LocalRun:
        """Run the files on this machine, one process a rank; a BackendError if a rank fails.

        Before `requests` without recording, `steps` of one request each are recorded.
        """

    @property
    def are_none(self) -> bool:
        """Tell whether the folder holds a plan only: no rank's file."""
        return not any(self.folder.glob(f"rank*{self.suffix}"))

    def check(self, plan: Plan, graph: Graph | None = None) -> None:
        """Refuse files that are not of the plan and, if the model's graph is given, of its weights.

        Those are DirectoryErrors, and a wrong file is a BackendError.
        """
        if not (self.folder / f"rank0{self.suffix}").is_file():
            raise DirectoryError(
                f"{self.folder} holds a plan only; partition again without --plan-only, or prove "
                "the plan with verify --symbolic"
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
