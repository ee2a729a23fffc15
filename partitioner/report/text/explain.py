"""`partition explain`: a plan's bottleneck, other schedules, and a node's other strategies.

Of a plan in stages all stages, shardings and the order of nodes stay. Another schedule, and more
micro-batches of the same size, are simulated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.prices.compute import node_estimates, node_limit
from partitioner.cost_model.profiles.forms import stores_parts
from partitioner.foundations import units
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Node
from partitioner.ir.mesh import numbers
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.phases import PhaseError
from partitioner.ir.pipeline.generate import SCHEDULES
from partitioner.ir.plan import Pipeline, PlacedNode
from partitioner.problem.memory_kinds import Holdings
from partitioner.report.findings.alternatives import constraints_on, not_taken
from partitioner.report.findings.bottleneck import COMPUTING, bottleneck
from partitioner.report.measured import Comparison
from partitioner.report.page.data import headline
from partitioner.report.page.memory import memory
from partitioner.report.planned import Planned, lanes
from partitioner.report.schema import Head
from partitioner.report.stages import schedule_name, stage_text
from partitioner.report.text.show import clean, loads_text
from partitioner.report.text.tables import table
from partitioner.search.neighbourhood import Neighbourhood

MAX_LINES = 10  #: Lines of each list.
MAX_STRATEGIES = 40  #: Strategies of one node that the referee evaluates.

_INFERENCE = "forward"  #: The schedule without backward passes.
_SCHEDULES_LEGEND = """\
stages, shardings and the order of nodes are held; "for the batch": seconds for as many samples as
a step of the plan has"""


def explain(result: Planned, comparison: Comparison[Planned] | None = None) -> str:
    """The plan's figures, the time of its bottleneck, and its tightest point of memory.

    The verdict is that of a measured run, if there was one.
    """
    limits = bottleneck(result)
    where = f"device {limits.device}" if limits.device is not None else "the critical path"
    time = [f"time of {where}, {units.seconds(limits.total_s)} a {limits.turn}"]
    if limits.total_s:
        rows = [("of that", "seconds", "share", "tasks")]
        for limit, spent_s in sorted(limits.seconds.items(), key=lambda entry: -entry[1]):
            label = f"bound by {limit}" if limit in COMPUTING else limit
            share = units.share(spent_s / limits.total_s)
            rows.append((label, units.seconds(spent_s), share, str(limits.counts.get(limit, ""))))
        time += table(rows)
    parts = [
        _verdict(headline(result, limits, comparison)),
        _schedules(result),
        time,
        _longest(result),
        _memory(result),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def explain_node(result: Planned, name: str) -> str:
    """A node's strategies with their cost, all other nodes keeping theirs."""
    neighbourhood = Neighbourhood(result.graph, result.plan, result.cluster)
    placed = neighbourhood.placed[result.node(name).node.name]
    tensors = [("tensor", "", "whole", "sharding")]
    for side, ends in (("in", placed.operands()), ("out", placed.results())):
        for value, at in ends:
            tensors.append((clean(value), side, str(result.graph.types[value]), str(at.sharding)))
    parts = [
        _about(result, placed),
        table(tensors),
        _choices(result, neighbourhood, placed.node),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _verdict(head: Head) -> list[str]:
    objective = head["objective"]
    cost, bound = (units.cost(objective, head[key]) for key in ("cost", "bound"))
    speed = f", {units.digits(head['speedup'])} times one device" if head["speedup"] else ""
    certified = f"bound {bound}, gap {units.share(head['gap'])}, {head['status']}"
    rows = {
        objective: f"{cost}, {certified if head['status'] else 'not certified'}",
        "step": f"{units.seconds(head['step_s'])}{speed}",
        **({"stages": head["step"]["sentence"]} if head["step"] else {}),
        **({} if objective == "latency" else {"latency": units.seconds(head["latency_s"])}),
        "limit": head["limit"],
        **({"delivery": head["delivery"]} if head["delivery"] else {}),
    }
    used = f"{head['devices_used']} of {head['devices']} devices of {head['cluster']}"
    title = f"{head['strategy'] or 'hand-made'} plan on {used}"
    rows = {**rows, "instead": head["instead"].removeprefix("Instead: ")}
    lines = [title, f"{head['verdict']}.", *(f"  {name:<12}{text}" for name, text in rows.items())]
    return [*lines, *(f"  {line}" for line in head["trials"])]


def _schedules(result: Planned) -> list[str]:
    choices = variations(result)
    if not choices:
        return []
    own_s = choices[0].step_s
    rows = [("the same stages with", "micro-batches", "batch", "step", "for the batch", "fullest")]
    for choice in choices:
        if choice.step_s is None:
            continue
        of_batch_s = choice.step_s / choice.batch
        change = ""
        if own_s and choice is not choices[0]:
            change = f" ({units.relative(of_batch_s / own_s - 1)})"
        full = units.size(choice.peak_bytes) + ("" if choice.fits else ", does not fit")
        step, batch = units.seconds(choice.step_s), f"{units.digits(choice.batch)} x"
        each = f"{units.seconds(of_batch_s)}{change}"
        rows.append((choice.name, str(choice.micro_batches), batch, step, each, full))
    lines = [*table(rows), *_SCHEDULES_LEGEND.splitlines()]
    return [*lines, *(f"not {c.name}: {c.why_not}" for c in choices if c.why_not)]


def _longest(result: Planned) -> list[str]:
    times = result.schedule.times
    tasks = [task for task in result.schedule.tasks if task.longest_s]
    tasks.sort(key=lambda task: -times(task) * task.longest_s)
    rows = [("longest tasks", "seconds", "where", "bound by")]
    for task in tasks[:MAX_LINES]:
        device = max(task.devices, key=task.devices.__getitem__)
        if task.placed is not None:
            name = f"{clean(task.placed.node.name)} ({clean(task.placed.node.op)})"
            limit = node_limit(result.graph, task.placed, device, result.cluster)
            where = str(task.placed.mesh)
        else:
            name, limit = clean(task.name), "links"
            where = "devices " + numbers(sorted(task.devices))
        often = f"{times(task)} x " if times(task) > 1 else ""
        rows.append((name, often + units.seconds(task.longest_s), where, limit))
    return table(rows) if len(rows) > 1 else []


def _memory(result: Planned) -> list[str]:
    joined = lanes(result)
    devices = memory(result, joined)
    shares = [entry["peak_bytes"] / entry["limit_bytes"] for entry in devices]
    lane = shares.index(max(shares))
    tightest, device = devices[lane], joined.fullest[lane]
    peak, limit, live = tightest["peak_bytes"], tightest["limit_bytes"], tightest["live"]
    tasks, executor = result.schedule.tasks, tightest["executor_bytes"]
    of_values = clean(tasks[tightest["peak_position"]].name) if tasks else "-"
    at = clean(result.evaluation.needed_peak(device).at) if executor else of_values
    share = f"{units.size(peak)} of {units.size(limit)} ({units.share(shares[lane])})"
    holdings = Holdings(result.graph, result.schedule)
    text = holdings.text(device, exact=bool(result.evaluation.over_bytes.get(device)))
    if executor:
        text = f"{text}, executor {units.size(executor)}"
    lines = [f"tightest memory: device {device} holds {share} at {at}: {text}"]
    largest = list(zip(live["name"], live["kind"], live["bytes"], strict=True))[:MAX_LINES]
    held = list(zip(live["times"], largest, strict=False))
    rows = [
        (clean(name), kind, units.size(nbytes), f"{n} micro-batches" if n > 1 else "")
        for n, (name, kind, nbytes) in held
    ]
    where = "there" if at == of_values else f"at {of_values}"
    head = (f"largest {where}", "kind", "bytes", "of")
    width = 4 if any(n > 1 for n, _ in held) else 3
    return [*lines, *table([row[:width] for row in (head, *rows)])] if rows else lines


def _about(result: Planned, placed: PlacedNode) -> list[str]:
    node, rule = placed.node, placed.rule
    bound, cert = constraints_on(result, node), result.plan.certificate
    spent_s = result.node_tasks[node.name].longest_s
    busy = (device for node in result.placed for device in node.mesh.devices)
    cluster, in_parts = result.cluster.beside(busy), stores_parts(result.placed)
    estimates = node_estimates(result.graph, placed, cluster, in_parts=in_parts).values()
    slowest = max(estimates, key=lambda estimate: estimate.seconds)
    source = slowest.source + (f" ± {units.share(slowest.error)}" if slowest.error else "")
    where = "the busiest device" if placed.loads else "each device"
    stage = stage_text(result.plan, placed.stage)
    each = f", for each micro-batch of {stage}" if stage else ""
    flops = rule.flops if rule else estimated_flops(result.graph, node)
    about = "as a whole" if rule else "as a whole, estimated"
    rule_text = "it has no rule, so it stays whole on one device"
    if rule is not None:
        sizes = (f"{name} = {factor.size}" for name, factor in rule.factors.items())
        rule_text = f"factors: {', '.join(sizes)}"
    loads = []
    if placed.loads:
        equal = units.share(1 / len(placed.loads))
        shares = f"{loads_text(placed)} of the choices of tokens, {equal} each if they were equal"
        loads.append(f"  loads: the parts of the experts get {shares}")
    return [
        f"{clean(node.name)} ({clean(node.op)}) on {placed.mesh}, {placed.cut_text or 'whole'}",
        f"  {units.seconds(spent_s)} on {where}{each} ({source}), {units.flops(flops)} {about}",
        f"  {rule_text}",
        *loads,
        *([f"  constrained by {'; '.join(clean(text, 120) for text in bound)}"] if bound else []),
        *([f"  searched: {clean(cert.space, 120)}"] if cert else []),
    ]


def _choices(result: Planned, neighbourhood: Neighbourhood, node: Node) -> list[str]:
    alternatives = neighbourhood.alternatives(node)
    chosen_s = result.evaluation.step_s
    rows = [("", "strategy", "on", "step", "change", "latency", "fullest device")]
    shorter = False
    refused: list[str] = []
    for entry in alternatives[:MAX_STRATEGIES]:
        try:
            figures = neighbourhood.evaluated(entry)
        except PhaseError as error:
            strategy = f"{entry.placed.cut_text or 'whole'} on {entry.placed.mesh}"
            refused.append(f"not {strategy}: {error}")
            continue
        fullest = units.size(max(figures.needed_bytes.values(), default=0))
        rows.append(
            (
                "*" if entry.chosen else "",
                entry.placed.cut_text or "whole",
                str(entry.placed.mesh),
                units.seconds(figures.step_s),
                "" if entry.chosen else units.change(figures.step_s - chosen_s),
                units.seconds(figures.latency_s),
                fullest if figures.fits_exactly else f"{fullest}, does not fit",
            )
        )
        shorter |= figures.fits_exactly and figures.step_s < chosen_s * (1 - 1e-9)
    lines = [
        f"{len(alternatives)} strategies, all other nodes keeping theirs (* the plan's)",
        *table(rows),
        *refused,
    ]
    if len(alternatives) > MAX_STRATEGIES:
        lines.append(f"and {len(alternatives) - MAX_STRATEGIES} dearer ones")
    if shorter:
        lines.append(f"a strategy with a shorter step exists: {not_taken(result, [node])}")
    return lines


@dataclass(frozen=True)
class Variation:
    """The plan's stages under another schedule or with other micro-batches."""

    name: str
    micro_batches: int
    batch: float = 1.0  #: Size of a step's batch as a multiple of the plan's.
    #: Simulated seconds of a step; None if the schedule does not serve the stages.
    step_s: float | None = None
    peak_bytes: int = 0  #: Of the fullest device.
    fits: bool = True  #: Whether every device is within its memory.
    why_not: str = ""  #: Why the schedule does not serve the stages; "" if it does.


def variations(result: Planned) -> tuple[Variation, ...]:
    """The plan's own step first, then other schedules, then other micro-batches."""
    pipeline = result.plan.pipeline
    if pipeline is None:
        return ()
    count, name = pipeline.micro_batches, schedule_name(pipeline)
    own = replace(_variation(result, pipeline, name), name=f"{name} (the plan's)")
    trains = bool(result.graph.backward)
    names = [s for s in SCHEDULES if s != name and (s != _INFERENCE) == trains]
    others = [_variation(result, replace(pipeline, schedule=s), s) for s in names]
    if not isinstance(pipeline.schedule, str):
        return (own, *others)  # a table has its micro-batches in it
    more = replace(pipeline, micro_batches=count + 1)
    twice = replace(pipeline, micro_batches=2 * count)
    return (
        own,
        *others,
        _variation(result, more, f"{name}, one micro-batch more", (count + 1) / count),
        _variation(result, twice, f"{name}, twice the micro-batches", 2.0),
    )


def _variation(result: Planned, pipeline: Pipeline, name: str, batch: float = 1.0) -> Variation:
    """Simulate another schedule, or other numbers of micro-batches."""
    count = pipeline.micro_batches
    changed = replace(result.plan, pipeline=pipeline, certificate=None)
    try:
        figures = evaluate(result.graph, changed, result.cluster)
    except IRError as error:
        why = str(error).removeprefix(f"{pipeline.schedule}: ")
        return Variation(name, count, batch, why_not=why)
    most = max(figures.needed_bytes.values())
    return Variation(name, count, batch, figures.step_s, most, figures.fits_exactly)
