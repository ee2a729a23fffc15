"""The JSON files of a saved compilation, which are checked as they are read.

This module loads neither front end nor solver.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.foundations.files import ResultError, read_text
from partitioner.frontends.torch.options import AtRest
from partitioner.ir.nodes.loads import Loads
from partitioner.ir.plan import OBJECTIVES, STATUSES, Plan, PlanError, trial_of

SOURCE_VERSION = 1
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
    """`request.json` of an ONNX model.

    Attributes:
        model: The model's file, absolute; it need not exist.
        graph_digest: Digest of the traced graph.
        dims: Sizes of symbolic dims, by symbol.
        shapes: Shapes of inputs, by name.
    """

    model: Path
    graph_digest: str
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    def write(self, folder: Path, final: Path) -> None:
        """Write `request.json` into `folder`, which will be moved to `final`."""
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        model = _relative(self.model, final)
        _write(folder, {**vars(self), "model": model, "dims": dict(self.dims), "shapes": shapes})


@dataclass(frozen=True)
class ModuleRequest:
    """`request.json` of a PyTorch module.

    Attributes:
        file: The ``.pt2`` file, absolute; None if the module came from elsewhere.
        factory: ``package.module:function``, or "": for people, it is never imported.
        graph_digest: Digest of the traced graph.
        call: The example inputs in words, as `Signature.described` gives them.
        training: Whether the backward pass was planned too.
        optimizer: The optimizer whose memory was counted.
        at_rest: As of `ModuleOptions`.
        loads: As of `ModuleOptions`.
    """

    file: Path | None
    factory: str
    graph_digest: str
    call: str
    training: bool
    optimizer: str
    at_rest: AtRest
    loads: Loads = ()

    def write(self, folder: Path, final: Path) -> None:
        """Write `request.json` into `folder`, which will be moved to `final`."""
        file = _relative(self.file, final)
        _write(folder, {"kind": "module", **vars(self), "file": file})


def _relative(path: Path | None, folder: Path) -> str:
    return "" if path is None else os.path.relpath(path, folder.resolve())


def _write(folder: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps({"version": SOURCE_VERSION, **data}, indent=1, sort_keys=True)
    (folder / "request.json").write_text(text + "\n")


def load_request(folder: Path) -> OnnxRequest | ModuleRequest:
    """`request.json` of a saved compilation.

    Raises:
        ResultError: It is missing, of another version or kind, or a field is wrong.
    """
    data = read_object(folder, "request.json")
    if data.get("version") != SOURCE_VERSION:
        raise ResultError(
            f"{folder}: request.json is version {data.get('version')!r}, not {SOURCE_VERSION}"
        )
    kind = data.get("kind", "onnx")
    if kind == "onnx":
        return _onnx_request(folder, data)
    if kind != "module":
        raise ResultError(f"{folder}: request.json has kind = {_shown(kind)}")
    data = {"at_rest": "", "loads": [], **data}  # older folders have no such fields
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
    )


def _onnx_request(folder: Path, data: Mapping[str, Any]) -> OnnxRequest:
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
    return OnnxRequest(model, data["graph_digest"], data["dims"], shapes)


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


def load_plan(folder: Path) -> Plan:
    """`plan.json` of a saved compilation, not resolved against its model.

    Raises:
        ResultError: It cannot be read.
        PlanError: It is malformed.
    """
    try:
        return Plan.from_json(_read(folder, "plan.json"))
    except PlanError as error:
        raise PlanError(f"{folder / 'plan.json'}: {error}") from None


def load_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a saved compilation: the facts that ``--json`` prints, and stages' seconds.

    Raises:
        ResultError: It is missing, or a field is wrong.
    """
    data = read_object(folder, "summary.json")
    _check_fields(folder, "summary.json", data, _SUMMARY)
    if "trials" in data:
        _check_fields(folder, "summary.json", data, {"trials": _list_of(_is_trial)})
    if "spaces" in data:  # folders of earlier versions have none
        _check_fields(folder, "summary.json", data, {"spaces": _list_of(_is_space)})
    return data


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
    """The JSON object in a file of a saved compilation.

    Raises:
        ResultError: It cannot be read, or is something else.
    """
    text = _read(folder, name)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ResultError(f"{folder}: {name} is not a JSON object")
    return data


Check = Callable[[Any], bool]


def _check_fields(
    folder: Path, name: str, data: Mapping[str, Any], fields: Mapping[str, Check]
) -> None:
    for key, is_valid in fields.items():
        if key not in data:
            raise ResultError(f"{folder}: {name} has no {key}")
        if not is_valid(data[key]):
            raise ResultError(f"{folder}: {name} has {key} = {_shown(data[key])}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST


def _is_rate(value: Any) -> bool:
    return value is None or _is_figure(value)


def _is_trial(value: Any) -> bool:
    try:
        trial_of(value)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _are_ranges(value: Any) -> bool:
    return _list_of(_is_size)(value) and len(value) % 2 == 0


def _are_loads(value: Any) -> bool:
    """Test for a pattern and a number for each expert, of which one is more than 0."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    pattern, numbers = value
    return _is_text(pattern) and _list_of(_is_figure)(numbers) and any(numbers)


def _list_of(is_valid: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _table_of(is_valid: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


def _one_of(*texts: str) -> Check:
    return lambda value: _is_text(value) and value in texts


def _is_space(value: object) -> bool:
    """Test for a searched space with the figures of its best plan."""
    return (
        isinstance(value, dict)
        and set(value) - {"changes"} == {"space", "fits", *_SPACE_SIZES, *_SPACE_FIGURES}
        and ("changes" not in value or _are_changes(value["changes"]))
        and _is_text(value["space"])
        and type(value["fits"]) is bool
        and all(_is_size(value[name]) for name in _SPACE_SIZES)
        and all(_is_figure(value[name]) for name in _SPACE_FIGURES)
    )


def _are_changes(value: object) -> bool:
    """Test for a stored comparison of two plans (`schema.Changes`)."""
    return (
        isinstance(value, dict)
        and set(value) == {"verdict", "figures", "moved", "moved_count", "same", "traffic"}
        and _is_text(value["verdict"])
        and _is_size(value["moved_count"])
        and _is_size(value["same"])
        and _list_of(_has(_FIGURE))(value["figures"])
        and _list_of(_has(_MOVED))(value["moved"])
        and _list_of(_has(_TRAFFIC))(value["traffic"])
    )


def _has(fields: Mapping[str, Check]) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and set(value) == set(fields)
        and all(check(value[name]) for name, check in fields.items())
    )


_FIGURE: Mapping[str, Check] = {
    "name": _is_text,
    "unit": _one_of("s", "bytes", "share", "per_s", "count", "times"),
    "before": _is_rate,
    "after": _is_rate,
    "better": _one_of("less", "more", ""),
}
_MOVED: Mapping[str, Check] = {
    **dict.fromkeys(("name", "op", "before", "after"), _is_text),
    **dict.fromkeys(("seconds_before", "seconds_after"), _is_figure),
}
_TRAFFIC: Mapping[str, Check] = {
    "kind": _is_text,
    **dict.fromkeys(("count_before", "count_after", "bytes_before", "bytes_after"), _is_size),
}
_SPACE_SIZES, _SPACE_FIGURES = ("devices_used", "busiest"), ("cost", "compute_s", "comm_s")
#: The largest figure: JSON's numbers have no limit, floats do.
_MOST = math.nextafter(math.inf, 0.0)
_REQUEST: Mapping[str, Check] = {
    "model": _is_text,
    "graph_digest": _is_text,
    "dims": _table_of(_is_size),
    "shapes": _table_of(_list_of(_is_size)),
}
_MODULE: Mapping[str, Check] = {
    **dict.fromkeys(("file", "factory", "graph_digest", "call", "optimizer"), _is_text),
    "training": lambda value: type(value) is bool,
    "at_rest": _one_of("", "zero1", "zero2", "zero3"),
    "loads": _list_of(_are_loads),
}
_ONE_DEVICE: Mapping[str, Check] = {
    **dict.fromkeys(("device", "held_bytes", "limit_bytes", "copies"), _is_size),
    **dict.fromkeys(("step_s", "latency_s"), _is_figure),
    "copies_per_s": _is_rate,
}
_SUMMARY: Mapping[str, Check] = {
    "objective": _one_of(*OBJECTIVES),
    "status": _one_of(*STATUSES),
    **dict.fromkeys(("strategy", "searched", "solver", "folded"), _is_text),
    "seed": _is_size,
    "seconds": _table_of(_is_figure),
    **dict.fromkeys(("cost", "bound", "gap", "sharded_flops_share"), _is_figure),
    "kept_whole": _table_of(_is_size),
    "kept_whole_flops_share": _is_figure,
    "one_device": _has(_ONE_DEVICE),
    "latency_s": _is_figure,
    **dict.fromkeys(("throughput_per_s", "speedup", "gain"), _is_rate),
    **dict.fromkeys(("devices", "devices_used"), _is_size),
    **dict.fromkeys(("nodes", "cut_nodes", "replicated_nodes"), _is_size),
    **dict.fromkeys(("cut_over", "replicated_on"), _list_of(_is_text)),
    "pinned": lambda value: type(value) is bool,
    "bound_by": _table_of(_are_ranges),
    "cost_sources": _table_of(_is_figure),
    "cost_error": _is_figure,
    "load_s": _list_of(_is_figure),
    "peak_bytes": _list_of(_is_size),
    "not_searched": _table_of(_is_text),
    "notes": _list_of(_is_text),
    "fewer_devices": lambda value: value is None or _table_of(_is_figure)(value),
}
