"""The cluster that a user names: a preset, a TOML file, a number of devices, this machine.

See docs/reference/cluster.md.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from partitioner.cost_model.cluster import presets
from partitioner.cost_model.cluster.launches import launches
from partitioner.cost_model.cluster.topology import (
    MAX_DEVICES,
    Cluster,
    DeviceSpec,
    check_launches,
)
from partitioner.cost_model.errors import ClusterOptionError, CostError
from partitioner.cost_model.profiles.database import Profile, default_profile
from partitioner.foundations.files import read_text
from partitioner.ir.checks import is_a, is_whole
from partitioner.ir.errors import did_you_mean

_DRIVER = Path("/proc/driver/nvidia")  #: Is there if NVIDIA's driver is.
_GPU = "GPU "  #: What fingerprints of GPUs begin with.


def resolve_cluster(
    spec: str | Path | None,
    devices: int | None = None,
    otherwise: int = 1,
    profile: Path | None = None,
) -> Cluster:
    """The cluster of a specification.

    Args:
        spec: A preset's name, with counts in front ("4xh100", "2x4xh200": 2 nodes of 4) or
            without, or several of one node ("rtx-3090+2xrtx-3060"); "ideal" or "local" in the same
            way; figures in parentheses in place of a name (see `presets.described`); a TOML file;
            None for the reference accelerator.
        devices: Number of devices; must agree with `spec` where both give it.
        otherwise: Number of devices of a preset, or of processes, where neither gives it.
        profile: File with measurements of this machine, for "local"; default: that of the user's
            cache folder.

    Raises:
        ClusterOptionError: The name is unknown, a count is 0, the counts disagree, or a profile
            is given for another cluster than "local".
        CostError: The file is malformed, or the machine has fewer GPUs or cores than asked for.
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
        _check_no_profile(f"{devices}x{presets.REFERENCE}", profile)
        return preset_cluster(presets.REFERENCE, 1, int(devices))
    if isinstance(spec, Path) or spec.endswith(".toml") or ("/" in spec and "(" not in spec):
        _check_no_profile(str(spec), profile)
        cluster = _read_cluster(Path(spec))
        _check_agreement(str(spec), len(cluster), devices)
        return cluster
    return _named(spec, devices, otherwise, profile)


def preset_cluster(name: str, nodes: int, per_node: int) -> Cluster:
    """Equal devices of a preset; devices of one node are numbered one after the other."""
    device, levels = presets.device(name), presets.levels(name, nodes, per_node)
    title = f"{nodes}x{per_node}x" if nodes > 1 else f"{per_node}x"
    title += device.name if name.startswith("(") else name
    return Cluster(title, (device,) * (nodes * per_node), levels)


def local_cluster(
    count: int | None, cuda: Any = None, profile: Path | None = None, processes: int = 1
) -> Cluster:
    """The first `count` GPUs of this machine (None: all), or as many processes on its cores.

    GPUs have the links of the preset with their name, their own memory size, and the rates of the
    preset where the profile knows no operator. On a machine without GPUs, `count` processes share
    cores and memory evenly; their operators and links cost what the profile says. PyTorch tells
    what GPUs there are; where it is not installed, NVIDIA's driver tells that there are none.

    Args:
        cuda: Stands in for `torch.cuda`.
        profile: File with measurements of this machine; default: that of the user's cache folder.
        processes: Number of processes if `count` is None.

    Raises:
        CostError: There are fewer GPUs, or fewer cores; a GPU is not one of the presets; the
            profile is damaged.
    """
    cuda = cuda or _cuda()
    available = int(cuda.device_count()) if cuda is not None and cuda.is_available() else 0
    file = profile or default_profile()
    if not available:
        return _processes(processes if count is None else count, file)
    wanted = available if count is None else count
    if available < wanted:
        raise CostError(f"cluster 'local' needs {wanted} GPUs, this machine has {available}")
    gpus = [_gpu(cuda.get_device_properties(index), file, wanted) for index in range(wanted)]
    names = {name for name, _ in gpus}
    pairs = itertools.permutations(range(wanted), 2)
    if len(names) == 1 and all(cuda.can_device_access_peer(a, b) for a, b in pairs):
        level = presets.levels(names.pop(), 1, wanted)[0]
    else:
        level = replace(presets.levels("l4", 1, wanted)[0], name="pcie")
    return Cluster("local", tuple(spec for _, spec in gpus), (level,))


def _cuda() -> Any:
    """PyTorch's view of GPUs; None where neither it nor NVIDIA's driver is installed."""
    if find_spec("torch") is None and not _DRIVER.exists():
        return None
    import torch

    return torch.cuda


def _processes(count: int, file: Path) -> Cluster:
    cores = _cores()
    if count > cores:
        raise CostError(
            f"cluster 'local' needs {count} cores, one for each process, this machine has {cores}"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = cores // count
    profile = Profile.read(file, cpu_fingerprint(), threads, count)
    spec = replace(presets.processes(count, threads, memory), profile=profile)
    levels = tuple(replace(level, profile=profile) for level in presets.levels("cpu", 1, count))
    return Cluster("local", (spec,) * count, levels)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_process(cluster: Cluster) -> Cluster | None:
    """A process with all cores of this machine, if the cluster is of several processes on it."""
    profile = cluster.devices[0].profile
    if cluster.name != "local" or len(cluster) == 1 or profile is None:
        return None
    return _processes(1, profile.file) if profile.device == cpu_fingerprint() else None


def cpu_fingerprint() -> str:
    """The key of this machine's processor in a profile: its model and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, "") or platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def gpu_fingerprint(name: str) -> str:
    """The key of a GPU in a profile: its name and the processor, which starts its kernels."""
    return f"{_GPU}{name} of {cpu_fingerprint()}"


def is_of_gpu(fingerprint: str) -> bool:
    """Test whether a fingerprint is of a GPU.

    >>> is_of_gpu(gpu_fingerprint("NVIDIA H200")), is_of_gpu(cpu_fingerprint())
    (True, False)
    """
    return fingerprint.startswith(_GPU)


def device_type(fingerprint: str) -> str | None:
    """PyTorch's type of the device of this machine that a fingerprint is of; None for no such one.

    >>> device_type(cpu_fingerprint())
    'cpu'
    """
    if fingerprint == cpu_fingerprint():
        return "cpu"
    if not is_of_gpu(fingerprint):
        return None
    import torch

    gpus = range(gpu_count())
    here = {gpu_fingerprint(torch.cuda.get_device_properties(gpu).name) for gpu in gpus}
    return "cuda" if fingerprint in here else None


def gpu_count() -> int:
    """Number of this machine's GPUs."""
    import torch

    return torch.cuda.device_count()


def _gpu(properties: Any, file: Path, count: int) -> tuple[str, DeviceSpec]:
    """The preset of one of `count` GPUs, and its figures with the GPU's memory and measurements."""
    title = str(properties.name)
    for name, row in presets.accelerators().items():
        if any(f" {title}".endswith(f" {end}") for end in row.cuda_names):
            threads = max(1, _cores() // count)
            profile = Profile.read(file, gpu_fingerprint(title), threads, count)
            memory_bytes = int(properties.total_memory)
            return name, replace(presets.device(name), memory_bytes=memory_bytes, profile=profile)
    raise CostError(f"no figures are known for GPU {title!r}; describe it in a TOML file")


def _named(spec: str, devices: int | None, otherwise: int, profile: Path | None) -> Cluster:
    if "+" in spec:
        _check_no_profile(spec, profile)
        return _joined(spec, devices)
    match = re.fullmatch(r"((?:[0-9]{1,9}[xX]){0,2})([a-zA-Z][a-zA-Z0-9-]*|\(.*\))", spec)
    if match is None:
        raise ClusterOptionError(
            f"cluster {spec!r} is not like '4xh100', '2x4xh200', 'rtx-3090+rtx-3060', 'ideal', "
            "'2x(memory=24GB,...)' or FILE.toml"
        )
    counts = [int(count) for count in match[1].lower().split("x") if count]
    name = match[2] if match[2].startswith("(") else presets.full_name(match[2].lower())
    if not all(counts):
        raise ClusterOptionError(f"cluster {spec!r} has no devices")
    total = counts[0] * counts[-1] if len(counts) == 2 else counts[0] if counts else None
    if total is not None and total > MAX_DEVICES:
        raise ClusterOptionError(f"cluster {spec!r} has more than {MAX_DEVICES} devices")
    if total is not None:
        _check_agreement(spec, total, devices)
    if name == "local":
        return local_cluster(total or devices, profile=profile, processes=otherwise)
    if not presets.is_known(name):
        known = (*presets.names(), "local")
        turned = re.fullmatch(r"(.+?)x([0-9]+)", name)  # "h100x4" is "4xh100"
        hint = did_you_mean(name, known)
        if turned and turned[1] in presets.names():
            hint = f"; did you mean '{turned[2]}x{turned[1]}'?"
        raise ClusterOptionError(
            f"cluster {spec!r}: no device {name!r}; "
            f"there are {', '.join(known)}, or FILE.toml{hint}"
        )
    _check_no_profile(spec, profile)
    if len(counts) == 2:
        return preset_cluster(name, counts[0], counts[1])
    return preset_cluster(name, 1, total or devices or otherwise)


def _joined(spec: str, devices: int | None) -> Cluster:
    """Devices of one node, such as "rtx-3090+2xrtx-3060", with the slowest of their links."""
    names = [name.strip() for name in spec.split("+")]
    parts = [_named(name, None, 1, None) for name in names]
    if any(part.name == "local" or re.match("[0-9]+x[0-9]+x", part.name) for part in parts):
        raise ClusterOptionError(
            f"cluster {spec!r}: devices of several nodes, or of this machine, are joined to others "
            "by a TOML file"
        )
    joined = tuple(itertools.chain.from_iterable(part.devices for part in parts))
    _check_agreement(spec, len(joined), devices)
    level = min((part.levels[0] for part in parts), key=lambda one: one.bandwidth_bytes_per_s)
    named = zip(names, parts, strict=True)
    titles = (part.name.removeprefix("1x") if "(" in n else n.lower() for n, part in named)
    return Cluster("+".join(titles), joined, (replace(level, size=len(joined), table=None),))


def _check_no_profile(spec: str, profile: Path | None) -> None:
    if profile is not None:
        raise ClusterOptionError(
            f"a profile is of cluster 'local', the cluster is {spec!r}: leave the profile out"
        )


def _check_agreement(spec: str, count: int, devices: int | None) -> None:
    if devices is not None and count != devices:
        raise ClusterOptionError(f"cluster {spec!r} has {count} devices, {devices} were asked for")


def _read_cluster(path: Path) -> Cluster:
    try:
        data = tomllib.loads(read_text(path))
    except OSError as error:
        raise CostError(f"cluster file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CostError(f"cluster file {path}: no text; a cluster is a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise CostError(f"cluster file {path}: {error}") from None
    try:
        devices = [_with_preset(entry) for entry in _tables(data, "devices")]
        counts = [entry.get("count", 1) for entry in devices]
        size = sum(count for count in counts if type(count) is int)
        levels = [{"size": size, **entry} for entry in _tables(data, "levels")]
        return Cluster.from_data({"name": path.stem, **data, "devices": devices, "levels": levels})
    except CostError as error:
        raise CostError(f"cluster file {path}: {error}") from None


def _tables(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    tables = data.get(key)
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise CostError(f"it needs at least one [[{key}]] table")
    return tables


def _with_preset(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    own, figures = _with_launches(entry), dict[str, Any]()
    if "preset" in own:
        preset = str(own["preset"])
        name = presets.full_name(preset)
        if not presets.is_known(name):
            raise CostError(f"no preset {name!r}; there are {', '.join(presets.names())}")
        spec = vars(presets.device(name))
        figures = {key: value for key, value in spec.items() if value is not None}
    return {**figures, **{key: value for key, value in own.items() if key != "preset"}}


def _with_launches(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of a device whose launches and seconds of a launch agree, where it gives one."""
    if "launches" not in entry:
        return {**entry, "launches": None} if "launch_s" in entry else entry
    name = str(entry["launches"])
    if "launch_s" in entry:
        raise CostError(f"launches = {name!r} and launch_s say the same thing: give one of them")
    check_launches(name)
    return {**entry, "launch_s": launches()[name].kernel_s}
