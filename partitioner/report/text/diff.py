"""`partition diff`: the nodes that two plans treat differently, and the change of the figures."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping

from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations import units
from partitioner.report.delivery import cost_with
from partitioner.report.findings.bottleneck import balance, tightest
from partitioner.report.page.data import device_rows
from partitioner.report.page.memory import crossing_bytes
from partitioner.report.planned import Planned, joined, lanes
from partitioner.report.schema import (
    VERSION,
    Better,
    DeviceRow,
    Diff,
    DiffTraffic,
    Figure,
    Moved,
    Unit,
)
from partitioner.report.stages import place_text, step_facts
from partitioner.report.text.show import clean
from partitioner.report.text.tables import safe, table

#: Plans whose costs differ by a smaller share cost the same.
EQUAL = 5e-5
MAX_RUNS = 40  #: Runs of moved nodes that the text lists.
#: Name, unit, which change is for the better, and value of a figure.
_Measure = tuple[str, Unit, Better, float | None]


def diff(
    before: Planned, after: Planned, names: tuple[str, str], objective: str | None = None
) -> Diff:
    """The changes from one plan to another, of the same model or of one that shares node names."""
    old, new = before.node_tasks, after.node_tasks
    both = [name for name in old if name in new]
    decisions = {name: (_decision(before, old[name]), _decision(after, new[name])) for name in both}
    moved = [
        Moved(
            name=name,
            op=before.graph.by_name[name].op,
            before=first,
            after=second,
            seconds_before=before.schedule.times(old[name]) * old[name].longest_s,
            seconds_after=after.schedule.times(new[name]) * new[name].longest_s,
        )
        for name, (first, second) in decisions.items()
        if first != second
    ]
    staged = any(step_facts(one.plan, one.evaluation) for one in (before, after))
    figures, others = (_measures(one, staged=staged) for one in (before, after))
    sizes, new_sizes = _sizes(before), _sizes(after)
    same = before.graph.digest == after.graph.digest
    return Diff(
        version=VERSION,
        kind="diff",
        title=after.name if same else f"{before.name} and {after.name}",
        before=names[0],
        after=names[1],
        verdict=diff_verdict(before, after, names, objective or before.objective),
        verdicts=(
            f"{names[0]}: {before.verdict().line}.",
            f"{names[1]}: {after.verdict().line}.",
        ),
        figures=[
            Figure(name=name, unit=unit, before=value, after=other, better=better)
            for (name, unit, better, value), (*_, other) in zip(figures, others, strict=True)
        ],
        moved=moved,
        only_before=[name for name in old if name not in new],
        only_after=[name for name in new if name not in old],
        same=len(both) - len(moved),
        traffic=[
            DiffTraffic(
                kind=kind,
                count_before=round(sum(share for share, _ in sizes[kind])),
                count_after=round(sum(share for share, _ in new_sizes[kind])),
                bytes_before=round(sum(share * size for share, size in sizes[kind])),
                bytes_after=round(sum(share * size for share, size in new_sizes[kind])),
            )
            for kind in sorted({*sizes, *new_sizes})
        ],
        devices=_devices(before, after),
    )


def diff_verdict(before: Planned, after: Planned, names: tuple[str, str], objective: str) -> str:
    """Say which of two plans is better by an objective, by how much, and why.

    Costs are those of verdicts as predicted: with the results on every rank.
    """
    old, new = before.evaluation, after.evaluation
    old_cost, new_cost = (cost_with(p.delivery, p.evaluation, objective) for p in (before, after))
    first, second = (units.cost(objective, cost) for cost in (old_cost, new_cost))
    figures = f"{second} against {first}"
    if not new.fits_exactly:
        return f"{names[1]} does not fit in memory; its cost would be {figures}."
    change = new_cost / old_cost - 1 if old_cost else 0.0
    if abs(change) < EQUAL:
        return f"{names[1]} costs the same as {names[0]} ({second})."
    words = {"memory": ("needs more", "needs less")}.get(objective, ("is slower", "is faster"))
    verb = words[0] if change > 0 else words[1]
    by = units.relative(abs(change)).removeprefix("+")
    loads, new_loads = (_of_a_request(of, of.load_s) for of in (old, new))
    here, there = (max(of, key=of.__getitem__) for of in (loads, new_loads))
    sent, computed = (
        _of_a_request(new, here_s(new))[there] - _of_a_request(old, here_s(old))[here]
        for here_s in (operator.attrgetter("comm_s"), operator.attrgetter("compute_s"))
    )
    more = {"communicates": sent, "computes": computed}
    does = max(more, key=lambda name: abs(more[name]))
    reason = ""
    if objective != "memory" and more[does]:
        how = "longer" if more[does] > 0 else "less"
        reason = f"; its busiest device {does} {units.seconds(abs(more[does]))} {how}"
    return f"{names[1]} {verb} by {by} than {names[0]}: {figures}{reason}."


def _devices(before: Planned, after: Planned) -> list[tuple[DeviceRow | None, DeviceRow | None]]:
    """The devices of both plans; those that share a lane in both in one row."""
    both = lanes(before), lanes(after)
    shared: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
    for device in range(max(len(before.cluster), len(after.cluster))):
        shared[both[0].of.get(device), both[1].of.get(device)].append(device)

    def rows(plan: Planned) -> list[DeviceRow | None]:
        has = [members[0] < len(plan.cluster) for members in shared.values()]
        of = iter(device_rows(plan, joined(plan, itertools.compress(shared.values(), has))))
        return [next(of) if one else None for one in has]

    return list(zip(rows(before), rows(after), strict=True))


def diff_text(changes: Diff) -> str:
    """The changes as lines for people."""
    figures = [("", changes["before"], changes["after"], "change")]
    for figure in changes["figures"]:
        old, new = (_shown(figure, figure[side]) for side in ("before", "after"))
        figures.append((figure["name"], old, new, _change(figure)))
    traffic = [("communication", "before", "", "after", "")]
    traffic += [
        (
            row["kind"],
            f"{row['count_before']} x",
            units.size(row["bytes_before"]),
            f"{row['count_after']} x",
            units.size(row["bytes_after"]),
        )
        for row in changes["traffic"]
    ]
    parts = [
        [safe(changes["verdict"]), *map(safe, changes["verdicts"])],
        table([tuple(map(clean, row)) for row in figures]),
        _moved(changes),
    ]
    if changes["traffic"]:
        parts.append(table(traffic))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _moved(changes: Diff) -> list[str]:
    moved = changes["moved"]
    lines = [f"{units.count(len(moved), 'node')} moved, {changes['same']:,} as before"]
    if not moved and not changes["same"]:
        lines = ["the two plans are of different models: they share no node"]
    for key, which in (("only_before", "first"), ("only_after", "second")):
        names: list[str] = changes[key]  # type: ignore[literal-required]
        if names:
            more = ", ..." if len(names) > 3 else ""
            shown = ", ".join(map(clean, names[:3]))
            lines.append(f"in the {which} alone: {units.count(len(names), 'node')}: {shown}{more}")
    rows = [("node", "before", "after", "seconds")]
    decision = operator.itemgetter("before", "after")
    runs = [list(run) for _, run in itertools.groupby(moved, key=decision)]
    for run in runs[:MAX_RUNS]:
        delta = sum(entry["seconds_after"] - entry["seconds_before"] for entry in run)
        first = run[0]
        node = f"{clean(first['name'])} ({clean(first['op'])})"
        if len(run) > 1:
            node = f"{clean(first['name'])} ... {clean(run[-1]['name'])} ({len(run)} nodes)"
        rows.append((node, first["before"], first["after"], units.change(delta)))
    if len(rows) > 1:
        lines += table(rows)
    if len(runs) > MAX_RUNS:
        lines.append(f"and {sum(map(len, runs[MAX_RUNS:]))} more nodes (--json lists all)")
    return lines


def _decision(result: Planned, task: Task) -> str:
    assert task.placed is not None
    where = place_text(result.plan, task.placed.stage, task.placed.mesh)
    return f"{where}: {task.placed.cut_text or 'whole'}"


def _measures(result: Planned, *, staged: bool) -> list[_Measure]:
    """The figures of a plan; one without stages is one stage that runs all at once."""
    figures, facts = result.evaluation, step_facts(result.plan, result.evaluation)
    busy_s, comm_s, sent_bytes = (
        float(sum(_of_a_request(figures, of).values()))
        for of in (figures.load_s, figures.comm_s, figures.sent_bytes)
    )
    of_step: list[_Measure] = [
        ("stages", "count", "", float(facts.get("stages", 1))),
        ("micro-batches", "count", "", float(facts.get("micro_batches", 1))),
        ("bubble", "share", "less", facts.get("bubble_share", 0.0)),
    ]
    return [
        ("step", "s", "less", figures.step_s),
        ("latency", "s", "less", figures.latency_s),
        ("throughput", "per_s", "more", units.finite(figures.throughput_per_s)),
        ("speed-up over one device", "times", "more", result.speedup),
        ("busy seconds of all devices", "s", "less", busy_s),
        ("communication of them", "s", "less", comm_s),
        ("bytes sent", "bytes", "less", sent_bytes),
        ("fullest device", "bytes", "less", float(max(figures.needed_bytes.values()))),
        ("fullest device, of its memory", "share", "less", 1 - tightest(figures)[1]),
        ("balance", "share", "more", balance(figures)),
        ("devices used", "count", "", float(figures.devices_used)),
        *(of_step if staged else ()),
    ]


def _of_a_request(figures: Evaluation, of: Mapping[int, float]) -> dict[int, float]:
    """What each device has of one request of a stream, by what it has of one that it serves."""
    return {device: of.get(device, 0) * share for device, share in figures.serving.items()}


def _sizes(result: Planned) -> dict[str, list[tuple[float, int]]]:
    """The share of requests in which each communication runs and its bytes, by kind."""
    sizes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    serving = result.evaluation.serving
    for task in result.schedule.tasks:
        if task.comm is not None:
            share = max(serving.get(device, 0.0) for device in task.devices)
            each = share, crossing_bytes(task)
            sizes[task.comm.kind.spelled] += [each] * result.schedule.times(task)
    return sizes


def _shown(figure: Figure, value: float | None) -> str:
    if value is None:
        return "none" if figure["unit"] == "times" else "unlimited"
    show = {
        "times": units.times,
        "s": units.seconds,
        "bytes": units.size,
        "share": units.share,
        "per_s": units.per_second,
    }.get(figure["unit"])
    return show(value) if show else f"{value:g}"


def _change(figure: Figure) -> str:
    old, new = figure["before"], figure["after"]
    if old is None or new is None or old == new:
        return ""
    if figure["unit"] == "share":
        return f"{units.relative(new - old).removesuffix(' %')} points"
    return units.relative(new / old - 1) if old else "from nothing"
