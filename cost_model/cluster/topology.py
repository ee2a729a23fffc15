"""Clusters: devices and the links between them, as plain data.

Rates of a `DeviceSpec` and a `LinkLevel` are those that large kernels and collectives reach;
`presets` derives them from the peak rates of datasheets. Tables say more than a rate does: those
of published measurements, and the profile of a machine.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from partitioner.cost_model.cluster.launches import BY_DEFAULT, BY_EXECUTOR, launches
from partitioner.cost_model.cluster.published import (
    Kernels,
    kernel_names,
    kernels,
    link_names,
    links,
)
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.executors import Executor
from partitioner.cost_model.profiles.database import Profile, beside_as
from partitioner.cost_model.profiles.entries import LinkTable
from partitioner.ir.errors import hints_keywords
from partitioner.ir.program import CommKind
from partitioner.ir.types import DTYPE_BITS

_UNITS_BYTES: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", 1)},
    "KB": 1000,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}

#: Largest cluster that is described device by device.
MAX_DEVICES = 16_384


def parse_bytes(size: str | float) -> int:
    """Bytes of ``"8GiB"`` (1024^3), ``"10GB"`` (1000^3), ``"512MiB"`` or a number of bytes.

    Raises:
        CostError: The text is something else, or not positive.

    >>> parse_bytes("8GiB"), parse_bytes("1.5kB"), parse_bytes(7)
    (8589934592, 1500, 7)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS_BYTES.get(match[2]) if match else None
    nbytes = float(match[1]) * unit if match and unit else 0.0
    if not 0 < nbytes < math.inf:
        raise CostError(f"size {size!r} is not like '8GiB', '10GB', '512MiB' or a number of bytes")
    return round(nbytes)


@dataclass(frozen=True)
class DeviceSpec:
    """A device."""

    name: str
    #: FLOP/s that large kernels reach, by element type. "float32" is required; absent types run at
    #: its rate.
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float  #: Bandwidth of its memory that streaming kernels reach.
    memory_bytes: int  #: Memory that a plan may fill.
    #: Least time between the starts of two kernels, and the start-up of a collective.
    launch_s: float
    profile: Profile | None = None  #: Measured seconds, which go before those by the rates.
    table: str | None = None  #: Table of `published.kernels`, which shapes what the rates give.
    is_gpu: bool = False  #: Whether its kernels take the memory for themselves that a GPU's take.
    #: Seconds that a communication takes beside the links', as a session of an executor ends there
    #: and another begins; None for none.
    border_s: float | None = None
    #: What submits its kernels, a name of `launches` or `BY_EXECUTOR`; None for a device that gives
    #: its own `launch_s`. See `launched_by`.
    launches: str | None = None

    def __post_init__(self) -> None:
        title, rates = f"device {self.name!r}", self.peak_flops_per_s
        _check_table(title, self.table, kernel_names)
        if self.launches not in (None, BY_EXECUTOR):
            check_launches(self.launches)
        unknown = sorted(set(rates) - set(DTYPE_BITS))
        if unknown:
            raise CostError(f"{title}: {unknown[0]!r} is not an element type")
        if "float32" not in rates:
            raise CostError(f"{title}: peak_flops_per_s gives no 'float32'")
        for dtype, rate in rates.items():
            _check(f"{title}: peak_flops_per_s of {dtype}", rate, rate > 0)
        _check(f"{title}: memory_bytes_per_s", self.memory_bytes_per_s, self.memory_bytes_per_s > 0)
        _check(f"{title}: memory_bytes", self.memory_bytes, self.memory_bytes > 0)
        _check_seconds(f"{title}: launch_s", self.launch_s)
        _check_seconds(f"{title}: border_s", self.border_s or 0.0)

    @property
    def kernels(self) -> Kernels | None:
        """The published measurements of its kernels."""
        return None if self.table is None else kernels(self.table)

    def start_s(self, *, is_known: bool) -> float:
        """Seconds of a communication's start-up (in its own if these are known) and border."""
        return (0.0 if is_known else self.launch_s) + (self.border_s or 0.0)

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s reached in an element type."""
        return self.peak_flops_per_s.get(dtype) or self.peak_flops_per_s["float32"]

    @property
    def launched_by(self) -> str | None:
        """Name the way to submit its kernels; None where `launch_s` is another time."""
        by = self.launches
        known = None if by is None else launches()[BY_DEFAULT if by == BY_EXECUTOR else by]
        return by if known is not None and known.kernel_s == self.launch_s else None

    def with_launches(self, name: str) -> DeviceSpec:
        """The device whose kernels are submitted by one of `launches`."""
        check_launches(name)
        return replace(self, launches=name, launch_s=launches()[name].kernel_s)

    def run_by(self, executor: Executor, *, training: bool = False) -> DeviceSpec:
        """The device with an executor on it; see `Cluster.run_by`."""
        asked, spec = self.launched_by, self
        if asked == BY_EXECUTOR:
            asked = executor.submits(training=training)
            spec = self.with_launches(asked)
        if not executor.in_sessions:
            return replace(spec, border_s=None)
        measured = self.profile.border if self.profile else None
        if measured is not None:
            return replace(spec, border_s=measured.seconds)
        graph_s = 0.0 if asked is None else launches()[asked].graph_s
        return replace(spec, border_s=graph_s) if spec.border_s is None and graph_s else spec


@dataclass(frozen=True)
class LinkLevel:
    """A level of the network: devices are numbered so that its groups are consecutive."""

    name: str  #: For people ("nvlink", "node", "rack").
    size: int  #: Devices in one group of this level; inner levels' sizes divide it.
    #: Of one device, in one direction, that collectives reach; inf is free.
    bandwidth_bytes_per_s: float
    latency_s: float  #: Of one hop.
    #: Bandwidth of reducing collectives if it differs (gloo sums on the host); None if it is the
    #: same.
    reduce_bytes_per_s: float | None = None
    #: Bandwidth of reduce-scatters if it differs (gloo sums all and keeps a part); None if it is
    #: that of other reducing collectives.
    scatter_bytes_per_s: float | None = None
    #: Share of a communication's seconds, 0 to 1, that compute hides if no node waits for it at
    #: once (see `cost_model.prices.reshard.beside_compute`), where it is not measured.
    overlap: float = 0.0
    #: The same of single kinds, which `profiles.database.beside_as` tells apart, in its place.
    overlaps: Mapping[str, float] = field(default_factory=dict, hash=False)
    profile: Profile | None = None  #: Measured seconds, which go before those by tables and rates.
    table: str | None = None  #: Table of `published.links`, which goes before the rates.

    def __post_init__(self) -> None:
        title = f"level {self.name!r}"
        _check_table(title, self.table, link_names)
        _check(f"{title}: size", self.size, self.size >= 1)
        _check_seconds(f"{title}: latency_s", self.latency_s)
        for name in ("bandwidth_bytes_per_s", "reduce_bytes_per_s", "scatter_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None:
                _check(f"{title}: {name}", rate, rate > 0)
        for kind in self.overlaps:
            if kind not in {beside_as(known) for known in CommKind}:
                kinds = ", ".join(dict.fromkeys(map(beside_as, CommKind)))
                raise CostError(f"{title}: overlaps has a kind {kind!r}, not one of {kinds}")
        for share in (self.overlap, *self.overlaps.values()):
            if not 0 <= share <= 1:
                raise CostError(f"{title}: overlap is {share}, not within 0 and 1")

    def tables(self, each: int) -> LinkTable | None:
        """Published seconds of communications of `each` ranks in every group of the level below."""
        return None if self.table is None else links(self.table).get(each)

    def known_sizes(self, each: int) -> frozenset[float]:
        """Bytes at which communications of `each` ranks a group are measured or published."""
        measured = frozenset[float]() if self.profile is None else self.profile.link_sizes
        table = self.tables(each)
        return measured if table is None else measured | table.sizes

    @property
    def message_s(self) -> float:
        """Seconds of a message without contents."""
        return self._known_s("send", 0.0) or self.latency_s

    @property
    def is_measured(self) -> bool:
        """Tell whether seconds of messages are measured or published: then with the start-up."""
        return self._known_s("send", 0.0) is not None

    def hidden_share(self, kind: CommKind, ranks: int) -> float:
        """Share of a communication among so many ranks that compute hides: measured or assumed."""
        measured = None if self.profile is None else self.profile.hidden_share(kind, ranks)
        assumed = self.overlaps.get(beside_as(kind), self.overlap)
        return assumed if measured is None else measured

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that the contents of a message add."""
        sent_s = self._known_s("send", nbytes)
        return nbytes / self.bandwidth_bytes_per_s if sent_s is None else sent_s - self.message_s

    @property
    def waiting_s(self) -> float:
        """Measured or published seconds that ranks which send to each other wait for each other."""
        return max(0.0, (self._known_s("all_to_all", 0.0) or 0.0) - self.message_s)

    def exchanged_contents_s(self, nbytes: float) -> float:
        """Seconds that the contents add where two ranks send so many bytes to each other."""
        exchanged_s = self._known_s("all_to_all", 2 * nbytes)
        empty_s = self._known_s("all_to_all", 0.0)
        if exchanged_s is None or empty_s is None:
            return self.transfer_s(nbytes)
        return exchanged_s - empty_s

    def _known_s(self, kind: str, nbytes: float) -> float | None:
        """Measured or published seconds of a communication of two ranks; None if not known."""
        if self.profile is not None:
            measured_s = self.profile.link_seconds(kind, 2, nbytes)
            if measured_s is not None:
                return measured_s
        table = self.tables(1)
        return None if table is None else table.seconds(kind, 2, nbytes)


@hints_keywords
@dataclass(frozen=True)
class Cluster:
    """Devices 0 .. n-1 and the levels of links between them, innermost first.

    Two devices communicate over the innermost level that has both in one group: ``device // size``.
    """

    name: str
    devices: tuple[DeviceSpec, ...]
    levels: tuple[LinkLevel, ...]

    def __post_init__(self) -> None:
        if not self.devices or not self.levels:
            raise CostError(f"cluster {self.name!r} needs at least one device and one level")
        if len(self.devices) > MAX_DEVICES:
            raise CostError(
                f"cluster {self.name!r} has {len(self.devices)} devices, more than {MAX_DEVICES}"
            )
        for inner, outer in itertools.pairwise(self.levels):
            if outer.size % inner.size or outer.size == inner.size:
                raise CostError(
                    f"cluster {self.name!r}: level {outer.name!r} of {outer.size} devices is not "
                    f"made of groups of {inner.size} (level {inner.name!r})"
                )
        if self.levels[-1].size != len(self.devices):
            raise CostError(
                f"cluster {self.name!r}: outermost level {self.levels[-1].name!r} has size "
                f"{self.levels[-1].size}, the cluster has {len(self.devices)} devices"
            )

    @cached_property
    def first_of_spec(self) -> Mapping[DeviceSpec, int]:
        """The first device of each specification, in ascending order."""
        first: dict[DeviceSpec, int] = {}
        for device, spec in enumerate(self.devices):
            first.setdefault(spec, device)
        return first

    @property
    def launches(self) -> Mapping[str, float]:
        """Least seconds of a kernel by what submits it, where that is known."""
        by = {spec.launched_by: spec.launch_s for spec in self.first_of_spec}
        return {name: by[name] for name in launches() if name in by}

    @property
    def has_equal_devices(self) -> bool:
        """Tell whether all devices have one specification."""
        return len(self.first_of_spec) == 1

    @property
    def is_uniform(self) -> bool:
        """Tell whether all devices are equal and any two talk over the same links."""
        return self.has_equal_devices and len(self.levels) == 1

    def level(self, devices: Iterable[int]) -> LinkLevel:
        """The innermost level with all these devices in one group: the outermost they span."""
        wanted = tuple(devices)
        for level in self.levels:
            if len({device // level.size for device in wanted}) <= 1:
                return level
        raise CostError(f"devices {wanted} are not all of cluster {self.name!r} ({len(self)})")

    def beside(self, devices: Iterable[int]) -> Cluster:
        """The cluster as it is for a plan that keeps these devices busy alone.

        Processes share the memory's bandwidth and the caches of their machine: where the seconds of
        operators were measured with one process alone, a plan on one device takes those.
        """
        if len(self) == 1 or len(set(devices)) > 1:
            return self
        return self._with_profiles(lambda profile: profile.beside(1))

    @property
    def crowded(self) -> Cluster:
        """The cluster for programs of one device each that keep all devices busy; see `beside`."""
        return self if len(self) == 1 else self._with_profiles(lambda profile: profile.crowded)

    def _with_profiles(self, changed: Callable[[Profile], Profile]) -> Cluster:
        if all(spec.profile is None for spec in self.first_of_spec):
            return self
        return self._with_specs(
            {
                spec: replace(spec, profile=changed(spec.profile)) if spec.profile else spec
                for spec in self.first_of_spec
            }
        )

    def first(self, count: int, start: int = 0) -> Cluster:
        """The cluster of so many devices alone, the first ones from a multiple of `count` on."""
        inner = [level for level in self.levels if level.size < count]
        last = replace(self.level((start, start + count - 1)), size=count)
        return replace(self, devices=self.devices[start : start + count], levels=(*inner, last))

    def run_by(self, executor: Executor, *, training: bool = False) -> Cluster:
        """The cluster with an executor on each device, for inference or training.

        Borders of sessions take measured seconds if they are known, else those that the devices
        give, else those to submit a graph of kernels, where kernels are submitted so; an executor
        without sessions has none. It submits the kernels where the devices leave that to it.
        """
        return self._with_specs(
            {spec: spec.run_by(executor, training=training) for spec in self.first_of_spec}
        )

    def with_launches(self, name: str) -> Cluster:
        """The same cluster of GPUs, whose kernels are submitted by one of `launches`.

        Raises:
            CostError: There is no such name; a device is no GPU, or its kernels are measured.
        """
        check_launches(name)
        for spec in self.first_of_spec:
            if not spec.is_gpu:
                raise CostError(
                    f"launches {name!r} is of GPUs, and device {spec.name!r} is none: leave it "
                    "out, or name a cluster of GPUs"
                )
            if spec.profile is not None and spec.profile.known:
                raise CostError(
                    f"launches {name!r}: the kernels of device {spec.name!r} are measured, with "
                    "what submitted them: leave it out"
                )
        return self._with_specs({spec: spec.with_launches(name) for spec in self.first_of_spec})

    def _with_specs(self, made: Mapping[DeviceSpec, DeviceSpec]) -> Cluster:
        if all(spec == other for spec, other in made.items()):
            return self
        return replace(self, devices=tuple(made[spec] for spec in self.devices))

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same cluster with this limit on every device."""
        limited = tuple(replace(device, memory_bytes=memory_bytes) for device in self.devices)
        return replace(self, devices=limited)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON (inf is text there) and `from_data`; equal devices are counted."""
        devices = [
            {"count": len(tuple(same)), **_plain(vars(spec))}
            for spec, same in itertools.groupby(self.devices)
        ]
        levels = [_plain(vars(level)) for level in self.levels]
        return {"name": self.name, "devices": devices, "levels": levels}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Cluster:
        """Inverse of `to_data`.

        Sizes and rates may be text: ``"80GB"``, ``"inf"``; `count` defaults to 1.

        Raises:
            CostError: A key is missing, unknown or malformed.
        """
        keys = {"name", "devices", "levels"}
        _check_keys("cluster", data, keys, keys)
        for key in ("devices", "levels"):
            if not isinstance(data[key], list):
                raise CostError(f"cluster {data['name']!r}: {key} is {data[key]!r}, not a list")
        inner = data["levels"][:1]
        entries = enumerate(data["devices"], 1)
        devices = [spec for entry in entries for spec in _devices(*entry, inner)]
        levels = tuple(_level(*entry) for entry in enumerate(data["levels"], 1))
        return cls(str(data["name"]), tuple(devices), levels)

    def __len__(self) -> int:
        return len(self.devices)


def check_launches(name: str | None) -> None:
    """Refuse, as a CostError, what is not one of `launches`."""
    if name not in launches():
        raise CostError(f"launches is {name!r}, not one of {', '.join(launches())}")


def _check_seconds(title: str, figure: float) -> None:
    if not 0 <= figure < math.inf:
        raise CostError(f"{title} is {figure}; it must be at least 0, and not infinite")


def _check(title: str, figure: float, good: bool) -> None:
    if not good or math.isnan(figure):
        raise CostError(f"{title} is {figure}; it must be above 0")


def _check_table(title: str, name: str | None, names: Callable[[], tuple[str, ...]]) -> None:
    if name is not None and name not in names():
        raise CostError(f"{title}: no table {name!r}; there are {', '.join(sorted(names()))}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _number(value) for key, value in values.items() if value not in (None, {})}


def _number(value: Any) -> Any:
    if isinstance(value, Profile):
        keys = ("file", "device", "threads", "processes")  # the level is that which has it
        return {**{key: getattr(value, key) for key in keys}, "file": str(value.file)}
    if isinstance(value, Mapping):
        return {key: _number(item) for key, item in sorted(value.items())}
    return "inf" if value == math.inf else value


#: Keys that tables of levels may leave out.
_OPTIONAL_RATES = {
    *("reduce_bytes_per_s", "scatter_bytes_per_s", "overlap", "overlaps", "profile", "table"),
}


def _check_keys(title: str, entry: Any, needed: set[str], known: set[str], number: int = 0) -> None:
    """Check the keys of a table; `number` is its position among those of its title, 0 for one."""
    if not isinstance(entry, Mapping):
        raise CostError(f"{title} is {entry!r}, not a table of figures")
    label = f"{title} {repr(entry['name']) if 'name' in entry else number or ''}".rstrip()
    missing, unknown = sorted(needed - set(entry)), sorted(set(entry) - known)
    if missing:
        stray = f" (it has an unknown key {unknown[0]!r})" if unknown else ""
        keys = ", ".join(sorted(needed - {"size"}))  # cluster files may leave out the size
        raise CostError(f"{label} has no {missing[0]!r}{stray}; a {title} needs {keys}")
    if unknown:
        keys = ", ".join(sorted(known))
        raise CostError(f"{label} has an unknown key {unknown[0]!r}; known: {keys}")


def _float(title: str, value: Any) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise CostError(f"{title} is {value!r}, not a number")


def _count(title: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:
        raise CostError(
            f"{title} is {value!r}, not a whole number of at least 1 (and at most {MAX_DEVICES})"
        )
    return value


def _devices(number: int, entry: Any, inner: Sequence[Any]) -> tuple[DeviceSpec, ...]:
    known = {item.name for item in fields(DeviceSpec)}
    optional = {"profile", "table", "is_gpu", "border_s", "launches"}
    _check_keys("device", entry, known - optional, known | {"count"}, number)
    rates, is_gpu = entry["peak_flops_per_s"], entry.get("is_gpu", False)
    title = f"device {entry['name']!r}"
    if not isinstance(rates, Mapping):
        raise CostError(f"{title}: peak_flops_per_s is {rates!r}, not rates by type")
    if not isinstance(is_gpu, bool):
        raise CostError(f"{title}: is_gpu is {is_gpu!r}, not true or false")
    count = _count(f"{title}: count", entry.get("count", 1))
    figures = ("memory_bytes_per_s", "launch_s", "border_s")
    spec = DeviceSpec(
        str(entry["name"]),
        {dtype: _float(f"rate of {dtype}", rate) for dtype, rate in rates.items()},
        memory_bytes=parse_bytes(entry["memory_bytes"]),
        profile=_profile(title, entry, inner=inner),
        table=str(entry["table"]) if "table" in entry else None,
        is_gpu=is_gpu,
        launches=None if entry.get("launches") is None else str(entry["launches"]),
        **{key: _float(f"{key} of {title}", entry[key]) for key in figures if key in entry},
    )
    return (spec,) * count


def _profile(
    title: str, table: Mapping[str, Any], level: str = "", inner: Sequence[Any] = ()
) -> Profile | None:
    """The profile of a table: of the devices of the level `inner`, if it gives no `processes`."""
    if "profile" not in table:
        return None
    title, entry, keys = f"{title}: profile", table["profile"], {"file", "device", "threads"}
    _check_keys(title, entry, keys, keys | {"processes"})
    threads = _count(f"{title}: threads", entry["threads"])
    if "processes" in entry:
        processes = _count(f"{title}: processes", entry["processes"])
    else:
        processes = max((_level_size(1, one) for one in inner), default=1)
    return Profile.read(Path(str(entry["file"])), str(entry["device"]), threads, processes, level)


def _level_size(number: int, entry: Any) -> int:
    known = {item.name for item in fields(LinkLevel)}
    _check_keys("level", entry, known - _OPTIONAL_RATES, known, number)
    return _count(f"level {entry['name']!r}: size", entry["size"])


def _level(number: int, entry: Any) -> LinkLevel:
    size, title = _level_size(number, entry), f"level {entry['name']!r}"
    others, overlaps = ("name", "size", "profile", "table", "overlaps"), entry.get("overlaps", {})
    if not isinstance(overlaps, Mapping):
        raise CostError(f"{title}: overlaps is {overlaps!r}, not shares by kind")
    level = str(entry["name"]) if number > 1 else ""  # the innermost has the plain entries
    return LinkLevel(
        str(entry["name"]),
        size,
        profile=_profile(title, entry, level),
        table=str(entry["table"]) if "table" in entry else None,
        overlaps={k: _float(f"overlap of {k} of {title}", v) for k, v in overlaps.items()},
        **{k: _float(f"{k} of {title}", value) for k, value in entry.items() if k not in others},
    )
