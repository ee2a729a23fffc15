"""From what a user writes (a name, a file, a number) to a Cluster (docs/reference/cluster.md)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partitioner.cost_model import presets
from partitioner.cost_model.devices import (
    MAX_DEVICES,
    Cluster,
    DeviceSpec,
    LinkLevel,
    parse_bytes,
)
from partitioner.cost_model.errors import ClusterOptionError, CostError
from partitioner.cost_model.local import local_cluster
from partitioner.ir.checks import is_a, is_whole

__all__ = [
    "Cluster",
    "DeviceSpec",
    "LinkLevel",
    "parse_bytes",
    "preset_cluster",
    "read_cluster",
    "resolve_cluster",
]


def resolve_cluster(spec: str | Path | None, devices: int | None = None) -> Cluster:
    """The cluster that is meant.

    Args:
        spec: A preset's name, with counts in front ("4xh100", "2x4xh200": 2 nodes of 4) or
            without; "ideal" or "local", likewise; a TOML file; None for the reference accelerator.
        devices: How many devices; must agree with `spec` where both say it.

    Raises:
        ClusterOptionError: The name is unknown, a count is none, or the counts disagree.
        CostError: The file is malformed, or the machine has fewer GPUs than asked for.
    """
    if devices is not None and not is_whole(devices):
        raise ClusterOptionError(f"devices is {devices!r}, not a whole number")
    if devices is not None and devices < 1:
        raise ClusterOptionError(f"{devices} devices were asked for; at least 1 is needed")
    if devices is not None and devices > MAX_DEVICES:
        raise ClusterOptionError(
            f"{devices} devices were asked for; at most {MAX_DEVICES} are planned for"
        )
    if spec is not None and not is_a(spec, str, Path):
        raise ClusterOptionError(f"cluster is {spec!r}; give a preset's name or a TOML file")
    if spec is None:
        if devices is None:
            raise ClusterOptionError("neither a number of devices nor a cluster is given")
        return preset_cluster(presets.REFERENCE, 1, int(devices))
    if isinstance(spec, Path) or spec.endswith(".toml") or "/" in spec:
        cluster = read_cluster(Path(spec))
        _agree(str(spec), len(cluster), devices)
        return cluster
    return _named(spec, devices)


def preset_cluster(name: str, nodes: int, per_node: int) -> Cluster:
    """Equal devices of a preset; devices of one node are numbered one after the other."""
    count = nodes * per_node
    title = f"{nodes}x{per_node}x{name}" if nodes > 1 else f"{per_node}x{name}"
    levels = presets.levels(name, nodes, per_node)
    return Cluster(title, (presets.device(name),) * count, levels)


def read_cluster(path: Path) -> Cluster:
    """A TOML file as a cluster.

    Raises:
        CostError: The file cannot be read, or says something that it may not.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostError(f"cluster file {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CostError(f"cluster file {path}: {error}") from None
    try:
        return Cluster.from_data(_filled(data, path.stem))
    except CostError as error:
        raise CostError(f"cluster file {path}: {error}") from None


def _named(spec: str, devices: int | None) -> Cluster:
    found = re.fullmatch(r"((?:[0-9]{1,9}x){0,2})([a-z][a-z0-9-]*)", spec.lower())
    if found is None:
        raise ClusterOptionError(
            f"cluster {spec!r} is not like '4xh100', '2x4xh200', 'ideal' or FILE.toml"
        )
    counts = [int(count) for count in found[1].split("x") if count]
    name = presets.ALIASES.get(found[2], found[2])
    if not all(counts):
        raise ClusterOptionError(f"cluster {spec!r} has no devices")
    total = counts[0] * counts[-1] if len(counts) == 2 else counts[0] if counts else None
    if total is not None and total > MAX_DEVICES:
        raise ClusterOptionError(f"cluster {spec!r} has more than {MAX_DEVICES} devices")
    if total is not None:
        _agree(spec, total, devices)
    if name == "local":
        return local_cluster(total or devices)
    if name not in (*presets.PRESETS, "cpu", "ideal"):
        known = ", ".join((*presets.names(), "local"))
        raise ClusterOptionError(
            f"cluster {spec!r}: no device {name!r}; there are {known}, or FILE.toml"
        )
    if len(counts) == 2:
        return preset_cluster(name, counts[0], counts[1])
    return preset_cluster(name, 1, total or devices or 1)


def _agree(spec: str, count: int, devices: int | None) -> None:
    if devices is not None and count != devices:
        raise ClusterOptionError(f"cluster {spec!r} has {count} devices, {devices} were asked for")


def _filled(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Presets of devices replaced by their figures, and the defaults of names and sizes."""
    devices = [_with_preset(entry) for entry in _tables(data, "devices")]
    count = sum(entry.get("count", 1) for entry in devices if _counts(entry))
    levels = [{"size": count, **entry} for entry in _tables(data, "levels")]
    return {"name": name, **data, "devices": devices, "levels": levels}


def _tables(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = data.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(e, dict) for e in found):
        raise CostError(f"it needs at least one [[{key}]] table")
    return found


def _counts(entry: Mapping[str, Any]) -> bool:
    return type(entry.get("count", 1)) is int


def _with_preset(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    if "preset" not in entry:
        return entry
    given = str(entry["preset"])
    name = presets.ALIASES.get(given, given)
    if name not in (*presets.PRESETS, "cpu", "ideal"):
        raise CostError(f"no preset {name!r}; there are {', '.join(presets.names())}")
    rest = {key: value for key, value in entry.items() if key != "preset"}
    return {**vars(presets.device(name)), **rest}
