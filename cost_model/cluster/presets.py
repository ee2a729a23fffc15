"""Accelerators by name: datasheet figures with their sources, and the shares that are reached.

In place of a name its figures may stand, see `described`. Those of names are in
`data/presets.toml` as the makers print them, those of "cpu" and "ideal" in cluster files beside it.
`device` and `levels` derate peak rates by the measurements in `published`, where the accelerator
names a table there, else by the shares of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from partitioner.cost_model.cluster.launches import BY_DEFAULT, BY_EXECUTOR, launches
from partitioner.cost_model.cluster.published import data_file, kernels
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel, parse_bytes
from partitioner.cost_model.errors import ClusterOptionError, CostError
from partitioner.ir.errors import did_you_mean

_TERA = 1e12
_GIGA = 1e9
_MICRO_S = 1e-6

#: Cores of the preset "cpu".
_CPU_CORES = 4
#: Presets that are cluster files.
_CLUSTERS = ("cpu", "ideal")

#: Preset of ``cluster=None``.
REFERENCE = "h100"


@dataclass(frozen=True)
class Preset:
    """An accelerator."""

    peak_tflops: Mapping[str, float]  #: Peak 1e12 FLOP/s by element type.
    memory_gb_per_s: float  #: Peak bandwidth, 1e9 bytes/s.
    memory_gb: float  #: Capacity, 1e9 bytes.
    link: str  #: Name of the links inside a node.
    link_gb_per_s: float  #: Of one device to the others of its node, one direction, 1e9 bytes/s.
    network_gb_per_s: float  #: Of one device to other nodes, one direction, 1e9 bytes/s.
    source: str  #: Document that gives the figures.
    cuda_names: tuple[str, ...]  #: Ends of the device name that the driver reports.
    home: bool = False  #: Whether machines at homes have it, which lie alone.
    table: str | None = None  #: Name of its measurements in `published`.
    overlap: float | None = None  #: `LinkLevel.overlap` of its links, where it is published.
    overlap_source: str = ""  #: Document that gives it.


def _figures() -> Mapping[str, Any]:
    return data_file("presets.toml")


def _share(what: str) -> float:
    return float(_figures()["reached"][what]["share"])


@cache
def accelerators() -> Mapping[str, Preset]:
    """Get all accelerators by their names."""
    return {
        name: Preset(**{**row, "cuda_names": tuple(row["cuda_names"])})
        for name, row in _figures()["accelerators"].items()
    }


def described(text: str) -> tuple[str, Preset]:
    """The name and the accelerator of a text in parentheses, which has its datasheet's figures.

    Raises:
        ClusterOptionError: A figure is missing, unknown, given twice, or of another unit.

    >>> figures = "bandwidth=936GB/s,float32=35.6TFLOPS,float16=71TFLOPS,link=31.5GB/s"
    >>> name, card = described(f"(memory=24GB,{figures})")
    >>> name, card.memory_gb, card.peak_tflops["bfloat16"]
    ('card', 24.0, 71.0)
    """
    given: dict[str, str] = {}
    for part in text[1:-1].split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key in given:
            raise ClusterOptionError(f"cluster {text!r} gives {key} twice; {_TOLD}")
        if key not in (*_FIGURES, "name", "network"):
            hint = did_you_mean(key, _FIGURES)
            raise ClusterOptionError(f"cluster {text!r}: {key!r} is no figure{hint}; {_TOLD}")
        given[key] = value
    if missing := [key for key in _FIGURES if key not in given]:
        raise ClusterOptionError(f"cluster {text!r} gives no {', no '.join(missing)}; {_TOLD}")
    name = given.pop("name", "card")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise ClusterOptionError(f"cluster {text!r}: name {name!r} is not of letters and digits")
    of = {key: _figure(text, key, value) for key, value in given.items()}
    rates = {"float32": of["float32"], "float16": of["float16"], "bfloat16": of["float16"]}
    network = of.get("network", _figures()["card"]["network_gb_per_s"])
    return name, Preset(rates, of["bandwidth"], of["memory"], "link", of["link"], network, text, ())


#: Figures of a card that are needed, with an example of each.
_FIGURES = {
    "memory": "24GB",
    "bandwidth": "936GB/s",
    "float32": "35.6TFLOPS",
    "float16": "71TFLOPS",
    "link": "31.5GB/s",
}
_TOLD = f"a card is like ({','.join(f'{key}={value}' for key, value in _FIGURES.items())})"


def _figure(text: str, key: str, value: str) -> float:
    """A figure in 1e9 bytes, 1e9 bytes/s or 1e12 FLOP/s; a ClusterOptionError of another unit."""
    example = _FIGURES.get(key, _FIGURES["link"])
    flops = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([GTP])(FLOPS|FLOP/s|F)", value)
    rate = value.removesuffix("/s")
    if example.endswith("FLOPS") and flops and float(flops[1]):
        return float(flops[1]) * {"G": 1e-3, "T": 1.0, "P": 1e3}[flops[2]]
    if not example.endswith("FLOPS") and (rate != value) == example.endswith("/s"):
        with suppress(CostError):
            if not rate[-1:].isdigit():  # a number alone has no unit
                return parse_bytes(rate) / _GIGA
    raise ClusterOptionError(f"cluster {text!r}: {key} is {value!r}, not like {example!r}")


def _row(name: str) -> tuple[str, Preset]:
    """The name for people, and the accelerator, of a name or of a text in parentheses."""
    return described(name) if name.startswith("(") else (name, accelerators()[name])


def is_known(name: str) -> bool:
    """Test whether `device` takes a name; a text in parentheses that it does not is refused."""
    return name in names() or (name.startswith("(") and bool(described(name)))


def usual_cards() -> tuple[str, ...]:
    """Names of the accelerators that are tried where none is named."""
    return tuple(_figures()["fit"]["cards"])


def full_name(name: str) -> str:
    """Get the name of the preset that has this other name; a name that is none stays."""
    return str(_figures()["aliases"].get(name, name))


@cache
def _cluster(name: str) -> Cluster:
    return Cluster.from_data(data_file(f"{name}.toml"))


def device(name: str) -> DeviceSpec:
    """The device of a preset, of "cpu", of "ideal" or of figures, at the rates that it reaches."""
    if name in _CLUSTERS:
        return _cluster(name).devices[0]
    title, row = _row(name)
    measured = kernels(row.table) if row.table is not None else None
    shares = measured.compute_shares if measured is not None else {}
    memory_share = measured.memory_share if measured is not None else _share("memory")
    return DeviceSpec(
        title,
        {
            dtype: tflops * _TERA * shares.get(dtype, _share("compute"))
            for dtype, tflops in row.peak_tflops.items()
        },
        row.memory_gb_per_s * _GIGA * memory_share,
        round(row.memory_gb * _GIGA),
        launches()[BY_DEFAULT].kernel_s,
        table=row.table,
        is_gpu=True,
        launches=BY_EXECUTOR,
    )


def levels(name: str, nodes: int, per_node: int) -> tuple[LinkLevel, ...]:
    """Links of `nodes` nodes of `per_node` devices, innermost first, at the rates they reach."""
    if name in _CLUSTERS:
        inner, outer = _cluster(name).levels
    else:
        _, row = _row(name)
        links = _figures()["links"]
        overlap = _figures()["overlap"]["share"] if row.overlap is None else row.overlap
        inner, outer = (
            LinkLevel(
                link,
                1,
                rate * _GIGA * _share("link"),
                links[link]["hop_us"] * _MICRO_S,
                overlap=overlap,
                table=table,
            )
            for link, rate, table in (
                (row.link, row.link_gb_per_s, row.table),
                ("network", row.network_gb_per_s, row.table and f"{row.table}-network"),
            )
        )
    inside = (replace(inner, size=per_node),) if per_node > 1 or nodes == 1 else ()
    return (*inside, replace(outer, size=nodes * per_node)) if nodes > 1 else inside


def processes(count: int, threads: int, memory_bytes: int) -> DeviceSpec:
    """A process, of `count` on a machine's cores, at the rates of "cpu" for its threads."""
    cpu, share = device("cpu"), threads / _CPU_CORES
    return replace(
        cpu,
        name=f"process ({threads} thread{'s' if threads > 1 else ''})",
        peak_flops_per_s={kind: rate * share for kind, rate in cpu.peak_flops_per_s.items()},
        memory_bytes_per_s=cpu.memory_bytes_per_s * share,
        memory_bytes=memory_bytes // count,
    )


def names() -> tuple[str, ...]:
    """Every name that `device` takes, and the aliases, sorted."""
    return tuple(sorted((*accelerators(), *_figures()["aliases"], *_CLUSTERS)))
