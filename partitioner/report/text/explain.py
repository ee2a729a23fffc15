"""`partition explain`: what limits a plan and, for a node, what its other strategies would cost."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from partitioner import units
from partitioner.cost_model.compute import node_limit
from partitioner.cost_model.evaluate import Evaluation
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Node
from partitioner.ir.mesh import numbers
from partitioner.ir.plan import PlacedNode
from partitioner.problem.memory_kinds import Holdings
from partitioner.report.alternatives import Alternative, Context
from partitioner.report.bottleneck import COMPUTING, Bottleneck
from partitioner.report.page.data import headline, result_bottleneck
from partitioner.report.page.memory import memory
from partitioner.report.page.schema import Head
from partitioner.report.planned import Planned
from partitioner.report.text.show import clean, table

#: Lines of each list.
MOST = 10
#: Strategies of one node whose latency and memory the referee works out.
MAX_STRATEGIES = 40


class ExplainError(PartitionerError, ValueError):
    """A node that the model does not have."""


def explain(result: Planned) -> str:
    """The bottleneck, where the time goes, and the tightest point of the memory."""
    found = result_bottleneck(result)
    parts = [_verdict(headline(result, found)), _time(found), _longest(result), _memory(result)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def explain_node(result: Planned, name: str) -> str:
    """A node's strategies with their cost, all other nodes keeping theirs.

    Raises:
        ExplainError: The model has no such node.
    """
    node = _find(result, name)
    context = Context(result.graph, result.plan, result.cluster)
    placed = context.placed[node.name]
    parts = [_about(result, placed), _tensors(result, placed), _choices(result, context, node)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _verdict(head: Head) -> list[str]:
    show = units.size if head["objective"] == "memory" else units.seconds
    speed = f", {head['speedup']:.3g} times one device" if head["speedup"] else ""
    bound = f"bound {show(head['bound'])}, gap {units.share(head['gap'])}, {head['status']}"
    rows = {
        head["objective"]: f"{show(head['cost'])}, {bound if head['status'] else 'not certified'}",
        "step": f"{units.seconds(head['step_s'])}{speed}",
        "latency": units.seconds(head["latency_s"]),
        "limit": head["limit"],
        "worth it?": head["worth"],
    }
    used = f"{head['devices_used']} of {head['devices']} devices of {head['cluster']}"
    title = f"{head['strategy'] or 'hand-made'} plan on {used}"
    return [title, *(f"  {name:<12}{text}" for name, text in rows.items())]


def _time(found: Bottleneck) -> list[str]:
    where = f"device {found.device}" if found.device is not None else "the critical path"
    title = f"time of {where}, {units.seconds(found.total_s)} a {found.turn}"
    if not found.total_s:
        return [title]
    rows = [("of that", "seconds", "share", "tasks")]
    for what, spent in sorted(found.seconds.items(), key=lambda entry: -entry[1]):
        label = f"bound by {what}" if what in COMPUTING else what
        count = found.counts.get(what, 0)
        rows.append(
            (
                label,
                units.seconds(spent),
                units.share(spent / found.total_s),
                str(count) if count else "",
            )
        )
    return [title, *table(rows)]


def _longest(result: Planned) -> list[str]:
    tasks = [task for task in result.schedule.tasks if any(task.devices.values())]
    tasks.sort(key=lambda task: -max(task.devices.values()))
    rows = [("longest tasks", "seconds", "where", "bound by")]
    for task in tasks[:MOST]:
        device = max(task.devices, key=task.devices.__getitem__)
        if task.placed is not None:
            name = f"{clean(task.placed.node.name)} ({clean(task.placed.node.op)})"
            why = node_limit(result.graph, task.placed, device, result.cluster)
            where = str(task.placed.mesh)
        else:
            name, why = clean(task.name), "links"
            where = "devices " + numbers(sorted(task.devices))
        rows.append((name, units.seconds(task.devices[device]), where, why))
    return table(rows) if len(rows) > 1 else []


def _memory(result: Planned) -> list[str]:
    found = memory(result)
    device = max(range(len(found)), key=lambda d: found[d]["peak_bytes"] / found[d]["limit_bytes"])
    entry = found[device]
    peak, limit = entry["peak_bytes"], entry["limit_bytes"]
    tasks = result.schedule.tasks
    at = clean(tasks[entry["peak_position"]].name) if tasks else "-"
    held = f"{units.size(peak)} of {units.size(limit)} ({units.share(peak / limit)})"
    parts = Holdings(result.graph, result.schedule)
    text = parts.text(device, exact=bool(result.evaluation.over_bytes.get(device)))
    lines = [f"tightest memory: device {device} holds {held} at {at}: {text}"]
    live = entry["live"]
    rows = [("largest there", "kind", "bytes")]
    rows += [
        (clean(name), kind, units.size(nbytes))
        for name, kind, nbytes in zip(
            live["name"][:MOST], live["kind"], live["bytes"], strict=False
        )
    ]
    return [*lines, *table(rows)] if len(rows) > 1 else lines


def _find(result: Planned, name: str) -> Node:
    found = result.graph.by_name.get(name)
    if found is not None:
        return found
    producer = result.graph.producers.get(name)  # the name of a tensor will do
    if producer is not None:
        return producer
    near = difflib.get_close_matches(name, result.graph.by_name, n=3, cutoff=0.4)
    hint = f"; near to it: {', '.join(map(repr, near))}" if near else ""
    raise ExplainError(f"the model has no node or tensor {name!r}{hint}")


def _about(result: Planned, placed: PlacedNode) -> list[str]:
    node = placed.node
    seconds = next(
        task.devices for task in result.schedule.tasks if task.placed and task.placed.node is node
    )
    flops = placed.rule.flops if placed.rule else 0.0
    spent = units.seconds(max(seconds.values(), default=0.0))
    where = f"on {placed.mesh}, {placed.cut_text or 'whole'}"
    lines = [
        f"{clean(node.name)} ({clean(node.op)}) {where}",
        f"  {spent} on each device, {flops:.4g} FLOP as a whole",
    ]
    if placed.rule is None:
        lines.append("  it has no rule, so it stays whole on one device")
    else:
        factors = ", ".join(f"{name} = {f.size}" for name, f in placed.rule.factors.items())
        lines.append(f"  factors: {factors}")
    return lines


def _tensors(result: Planned, placed: PlacedNode) -> list[str]:
    rows = [("tensor", "", "whole", "sharding")]
    sides = [("in", placed.operands()), ("out", placed.results())]
    for side, tensors in sides:
        for value, at in tensors:
            type_ = result.graph.types[value]
            rows.append((clean(value), side, str(type_), str(at.sharding)))
    return table(rows)


def _choices(result: Planned, context: Context, node: Node) -> list[str]:
    alternatives = context.alternatives(node)
    shown = alternatives[:MAX_STRATEGIES]
    own = shown[0]
    rows: list[tuple[str, ...]] = [
        ("", "strategy", "on", "step", "change", "latency", "fullest device")
    ]
    evaluated = [(entry, context.evaluated(entry)) for entry in shown]
    rows += [_choice(entry, own, got) for entry, got in evaluated]
    lines = [
        f"{len(alternatives)} strategies, all other nodes keeping theirs (* the plan's)",
        *table(rows),
    ]
    if len(alternatives) > len(shown):
        lines.append(f"and {len(alternatives) - len(shown)} dearer ones")
    return lines + list(_why(result, evaluated))


def _choice(entry: Alternative, own: Alternative, got: Evaluation) -> tuple[str, ...]:
    full = units.size(max(got.held_bytes.values(), default=0))
    return (
        "*" if entry.chosen else "",
        entry.placed.cut_text or "whole",
        str(entry.placed.mesh),
        units.seconds(got.step_s),
        "" if entry.chosen else units.change(entry.step_s - own.step_s),
        units.seconds(got.latency_s),
        full if got.fits_exactly else f"{full}, does not fit",
    )


def _why(result: Planned, shown: Sequence[tuple[Alternative, Evaluation]]) -> Iterator[str]:
    """Why a strategy that looks better alone was not taken."""
    (own, _), *others = shown
    cert = result.plan.certificate
    kind = cert.objective if cert else "throughput"
    better = [a for a, got in others if got.fits_exactly and a.step_s < own.step_s * (1 - 1e-9)]
    if better and kind != "throughput":
        yield f"a shorter step was not asked for: the plan's objective is {kind}"
    elif better:
        gap = f" (its gap is {units.share(cert.gap)})" if cert else ""
        yield f"a strategy with a shorter step exists: the plan is not the best one{gap}"
