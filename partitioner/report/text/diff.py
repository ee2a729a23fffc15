"""`partition diff`: what moved between two plans, and what that changed."""

from __future__ import annotations

import itertools
from collections import Counter

from partitioner import units
from partitioner.ir.plan import PlacedNode, resolve
from partitioner.report.bottleneck import balance, tightest
from partitioner.report.page.data import device_rows
from partitioner.report.page.schema import (
    VERSION,
    DeviceRow,
    Diff,
    DiffTraffic,
    Figure,
    Moved,
)
from partitioner.report.page.traffic import crossing_bytes
from partitioner.report.planned import Planned
from partitioner.report.text.show import clean, table

#: Runs of moved nodes that the text lists.
MOST = 40


def diff(before: Planned, after: Planned, names: tuple[str, str]) -> Diff:
    """What changed from one plan to another.

    Args:
        before: The first.
        after: The second; of the same model, or of one whose nodes share names.
        names: What to call the two.
    """
    old, new = _nodes(before), _nodes(after)
    both = [name for name in old if name in new]
    seconds_old, seconds_new = _seconds(before), _seconds(after)
    moved = [
        Moved(
            name=name,
            op=old[name].node.op,
            before=_decision(old[name]),
            after=_decision(new[name]),
            seconds_before=seconds_old[name],
            seconds_after=seconds_new[name],
        )
        for name in both
        if _decision(old[name]) != _decision(new[name])
    ]
    return Diff(
        version=VERSION,
        kind="diff",
        title=after.name if _same(before, after) else f"{before.name} and {after.name}",
        before=names[0],
        after=names[1],
        figures=_figures(before, after),
        moved=moved,
        only_before=[name for name in old if name not in new],
        only_after=[name for name in new if name not in old],
        same=len(both) - len(moved),
        traffic=_traffic(before, after),
        devices=_devices(before, after),
    )


def diff_text(found: Diff) -> str:
    """The same in lines for people."""
    figures = [("", found["before"], found["after"], "change")]
    for figure in found["figures"]:
        one, two = figure["before"], figure["after"]
        figures.append((figure["name"], _shown(figure, one), _shown(figure, two), _change(figure)))
    traffic = [("communication", "before", "", "after", "")]
    traffic += [
        (
            row["kind"],
            f"{row['count_before']} x",
            units.size(row["bytes_before"]),
            f"{row['count_after']} x",
            units.size(row["bytes_after"]),
        )
        for row in found["traffic"]
    ]
    parts = [table([tuple(map(clean, row)) for row in figures]), _moved(found)]
    if found["traffic"]:
        parts.append(table(traffic))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _same(before: Planned, after: Planned) -> bool:
    return before.graph.digest == after.graph.digest


def _moved(found: Diff) -> list[str]:
    moved = found["moved"]
    lines = [f"{len(moved)} nodes moved, {found['same']} are as they were"]
    if not moved and not found["same"]:
        lines = ["the two plans are of different models: they share no node"]
    for key, which in (("only_before", "first"), ("only_after", "second")):
        names: list[str] = found[key]  # type: ignore[literal-required]
        if names:
            more = ", ..." if len(names) > 3 else ""
            shown = ", ".join(map(clean, names[:3]))
            lines.append(f"{len(names)} nodes are in the {which} alone: {shown}{more}")
    rows = [("node", "before", "after", "seconds")]
    runs = [list(run) for _, run in itertools.groupby(moved, key=_move)]
    for run in runs[:MOST]:
        delta = sum(entry["seconds_after"] - entry["seconds_before"] for entry in run)
        first = run[0]
        node = f"{clean(first['name'])} ({clean(first['op'])})"
        if len(run) > 1:
            node = f"{clean(first['name'])} ... {clean(run[-1]['name'])} ({len(run)} nodes)"
        rows.append((node, first["before"], first["after"], units.change(delta)))
    if len(rows) > 1:
        lines += table(rows)
    if len(runs) > MOST:
        lines.append(f"and {sum(map(len, runs[MOST:]))} more nodes (--json lists all)")
    return lines


def _move(entry: Moved) -> tuple[str, str]:
    return entry["before"], entry["after"]


def _nodes(result: Planned) -> dict[str, PlacedNode]:
    return {placed.node.name: placed for placed in resolve(result.graph, result.plan)}


def _decision(placed: PlacedNode) -> str:
    return f"{placed.mesh}: {placed.cut_text or 'whole'}"


def _seconds(result: Planned) -> dict[str, float]:
    return {
        task.placed.node.name: max(task.devices.values(), default=0.0)
        for task in result.schedule.tasks
        if task.placed is not None
    }


def _figures(before: Planned, after: Planned) -> list[Figure]:
    sides = [_measures(before), _measures(after)]
    rows = [(name, unit, sides[0][name, unit], sides[1][name, unit]) for name, unit in sides[0]]
    return [
        Figure(name=name, unit=unit, before=one, after=two)  # type: ignore[typeddict-item]
        for name, unit, one, two in rows
    ]


def _measures(result: Planned) -> dict[tuple[str, str], float | None]:
    got = result.evaluation
    rate = got.throughput_per_s
    return {
        ("step", "s"): got.step_s,
        ("latency", "s"): got.latency_s,
        ("throughput", "per_s"): rate if rate < float("inf") else None,
        ("busy seconds of all devices", "s"): sum(got.load_s.values()),
        ("communication of them", "s"): sum(got.comm_s.values()),
        ("bytes sent", "bytes"): float(sum(got.sent_bytes.values())),
        ("fullest device", "bytes"): float(max(got.held_bytes.values())),
        ("fullest device, of its memory", "share"): 1 - tightest(got)[1],
        ("balance", "share"): balance(got),
        ("devices used", "count"): float(got.devices_used),
    }


def _traffic(before: Planned, after: Planned) -> list[DiffTraffic]:
    counts: list[Counter[str]] = []
    sizes: list[Counter[str]] = []
    for result in (before, after):
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for task in result.schedule.tasks:
            if task.comm is not None:
                kind = task.comm.kind.spelled
                count[kind] += 1
                size[kind] += crossing_bytes(task)
        counts.append(count)
        sizes.append(size)
    return [
        DiffTraffic(
            kind=kind,
            count_before=counts[0][kind],
            count_after=counts[1][kind],
            bytes_before=sizes[0][kind],
            bytes_after=sizes[1][kind],
        )
        for kind in sorted({*counts[0], *counts[1]})
    ]


def _devices(before: Planned, after: Planned) -> list[tuple[DeviceRow | None, DeviceRow | None]]:
    old, new = device_rows(before), device_rows(after)
    count = max(len(old), len(new))
    return [
        (old[d] if d < len(old) else None, new[d] if d < len(new) else None) for d in range(count)
    ]


def _shown(figure: Figure, value: float | None) -> str:
    if value is None:
        return "unlimited"
    show = {
        "s": units.seconds,
        "bytes": units.size,
        "share": units.share,
        "per_s": units.per_second,
    }.get(figure["unit"])
    return show(value) if show else f"{value:g}"


def _change(figure: Figure) -> str:
    one, two = figure["before"], figure["after"]
    if one is None or two is None or one == two:
        return ""
    if figure["unit"] == "share":
        return f"{100 * (two - one):+.3g} points"
    return f"{100 * (two / one - 1):+.3g} %" if one else "from nothing"
