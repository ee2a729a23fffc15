"""The lines of a summary below its verdict, and facts that it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from partitioner.cost_model.cluster.launches import launches
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_stored, is_view
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.plan import Certificate, Plan, Trial
from partitioner.ir.rule import Rule
from partitioner.report.delivery import Delivery
from partitioner.report.one_device import OneDevice
from partitioner.report.stages import step_sentence
from partitioner.report.verdict import Verdict

#: A proven plan within this gap is called optimal, whatever gap was requested.
OPTIMAL_GAP = 1e-4
#: Most peaks that the summary prints one by one.
MAX_PEAKS = 8
#: Least share of all FLOPs at which operators without a rule are named.
WORTH_NAMING = 0.01


def lines(summary: Mapping[str, Any], verdict: Verdict, search_s: float | None = None) -> list[str]:
    """The facts below the verdict's line, with the seconds of the search if they are known."""
    objective, fewer = summary["objective"], summary["fewer_devices"]
    single = OneDevice(**summary["one_device"])
    alone_s = alone_per_s = "the whole model does not fit one device"
    if single.fits:
        alone_s = f"one device: {units.seconds(single.latency_s)}"
        alone_per_s = f"one device: {units.per_second(single.throughput_per_s)}"
    sizes = list(map(units.size, summary["peak_bytes"]))
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    peaks = ", ".join(f"{count} x {size}" if count > 1 else size for size, count in runs)
    if len(runs) > MAX_PEAKS:
        least, most = (units.size(end(summary["peak_bytes"])) for end in (min, max))
        peaks = f"{least} to {most} on {len(sizes)} devices"
    searched = _searched(summary["seed"], summary["folded"], search_s)
    used, delivery = summary["devices_used"], ""
    if facts := summary.get("delivery"):
        delivery = Delivery(**facts).sentence(objective)
    idle = ", the others idle" if used < summary["devices"] else ""
    made = [
        *([f"  instead     {verdict.instead}"] if verdict.instead else []),
        f"  plan        {summary['strategy']} on {used} of {summary['devices']} devices{idle}: "
        + _certified(objective, *(summary[key] for key in ("cost", "bound", "gap", "status")))
        + verdict.bound_note(summary["bound"]),
        *([f"  step        {step}"] if (step := step_sentence(summary)) else []),
        *(
            f"  blocks      {line}"
            for line in block_lines(summary.get("blocks", ()), devices=summary["devices"])
        ),
        f"  latency     {units.seconds(summary['latency_s'])} ({alone_s})",
        f"  throughput  {units.per_second(summary['throughput_per_s'])} ({alone_per_s})",
        *([f"  delivery    {delivery}"] if delivery else []),
        f"  peak memory {peaks} (one device: {units.size(single.held_bytes)})",
        f"  split       {split_sentence(summary)}",
        f"  costs       {costs_sentence(summary['cost_sources'], summary['cost_error'])}"
        + launches_clause(summary.get("launches", {})),
        f"  search      {solved_by(summary['solver'], summary['status'])}, {searched}",
        *([f"  proof       {summary['proof']}"] if "proof" in summary else []),
    ]
    if fewer and (fewer["devices"] > 1 or fewer["cost"] == fewer["cost_here"]):
        count, cost, here = fewer["devices"], fewer["cost"], fewer["cost_here"]
        few = f"{count:,} devices" if count > 1 else "one device"
        better = f"{units.cost(objective, cost)} against {units.cost(objective, here)} here"
        if cost < here:
            made.append(f"  note: {few} would do better by {objective}: {better}")
        else:
            does = "do" if count > 1 else "does"
            made.append(f"  note: {few} {does} as well by {objective}: the others are left idle")
    trials = [Trial(**trial) for trial in summary.get("trials", ())]
    made += [f"  {line}" for line in trial_lines(trials)]
    by_reason: dict[str, list[str]] = {}
    for space, why in summary["not_searched"].items():
        by_reason.setdefault(why.removesuffix(f" in {space}"), []).append(space)
    made += [f"  note: no plan in {', '.join(of)}: {why}" for why, of in by_reason.items()]
    made += [f"  note: {note}" for note in summary["notes"]]
    return made


def stretch_rows(graph: Graph, plan: Plan) -> list[dict[str, Any]]:
    """The stretches of a plan that run in blocks, as data, each with the devices that run it."""
    devices: dict[int, dict[int, None]] = {}
    for name, block in graph.blocks.items():
        group = plan.groups[plan.nodes[name].group]
        devices.setdefault(block, {}).update(dict.fromkeys(group.devices))
    rows, first = [], 0
    for stretch, data in zip(plan.blocks.stretches, plan.blocks.to_data(), strict=True):
        blocks = range(first, first + stretch.blocks)
        rows.append(
            {**data, "devices": list({d: None for b in blocks for d in devices.get(b, ())})}
        )
        first = blocks.stop
    return rows


def block_lines(stretches: Sequence[Mapping[str, Any]], *, devices: int) -> list[str]:
    """The stretches of a plan in blocks, a line each; those not cut in one line."""
    lines: list[str] = []
    in_turn: dict[str, int] = {}
    for stretch in stretches:
        chunks = stretch["chunks"]
        plural = "s" if len(stretch["devices"]) > 1 else ""
        on = f"on device{plural} {', '.join(map(str, stretch['devices']))}" if devices > 1 else ""
        if not chunks:
            in_turn[on] = in_turn.get(on, 0) + 1
            continue
        first, last = stretch["first"], stretch["last"]
        nodes = f"{first} to {last}" if first != last else first
        counts = " x ".join(str(chunk["parts"]) for chunk in chunks)
        dims = " and ".join(f"dim {chunk['dim']} of {chunk['value']}" for chunk in chunks)
        lines.append(f"{nodes}: {counts} blocks of {dims} {on}".rstrip())
    for on, count in in_turn.items():
        runs = "runs of layers load their" if count > 1 else "run of layers loads its"
        lines.append(f"{count} {runs} constants in turn {on}".rstrip())
    return lines


def trial_lines(trials: Sequence[Trial]) -> list[str]:
    """The plans that were run, one line each after a heading; nothing if none was."""
    if not trials:
        return []
    lines = ["chosen by measurement on this machine (cost, bound and gap are the cost model's):"]
    for trial in trials:
        measured = f"measured {units.seconds(trial.measured_s)} (± {units.share(trial.spread)})"
        predicted = f"predicted {units.seconds(trial.predicted_s)}"
        lines.append(f"  {trial.plan}: {measured}, {predicted}{', kept' if trial.kept else ''}")
    return lines


def costs_sentence(shares: Mapping[str, float], error: float) -> str:
    """Where the seconds of operators come from."""
    if set(shares) == {"datasheet"}:
        return "of operators by the cluster's rates, not measured"
    order = ("measured", "fitted", "published", "datasheet")
    parts = [f"{units.share(shares[name])} {name}" for name in order if name in shares]
    spread = f" (± {units.share(error)})" if {"measured", "fitted"} & set(shares) else ""
    return f"of operators {', '.join(parts)}{spread}"


def launches_clause(kernel_s: Mapping[str, float]) -> str:
    """Clause on the ways to submit kernels, from their least seconds; "" for none."""
    made = [
        f"{launches()[name].title}, {units.seconds(s)} a kernel" for name, s in kernel_s.items()
    ]
    return f"; {'; '.join(made)}" if made else ""


def status_text(status: str, gap: float) -> str:
    """The end of a search in words; "optimal" only of a plan that meets its bound."""
    if status == "optimal" and gap > OPTIMAL_GAP:
        return "within the gap asked for"
    return "stopped by the time limit" if status == "time_limit" else status


def _certified(objective: str, cost: float, bound: float, gap: float, status: str) -> str:
    return (
        f"{objective} cost {units.cost(objective, cost)}, bound {units.cost(objective, bound)}, "
        f"gap {units.share(gap)}, {status_text(status, gap)}"
    )


def _searched(seed: int, folded: str, search_s: float | None) -> str:
    spent = "" if search_s is None else f", {units.seconds(search_s)}"
    return f"seed {seed}{spent}" + (f", folded: {folded}" if folded else "")


def solved_by(solver: str, status: str) -> str:
    """Say which methods found a plan / proved its bound, and that they needed no ILP."""
    found, _, proved = solver.partition(" / ")
    methods = found if proved in ("", found) else f"{found}, bound by {proved}"
    needless = status == "optimal" and "integer program" not in solver
    return f"{methods} (no integer program needed)" if needless else methods


def certificate_line(cert: Certificate, search_s: float | None = None) -> str:
    """A certificate in one line; `search_s` as of `text`."""
    certified = _certified(cert.objective, cert.cost, cert.bound, cert.gap, cert.status)
    searched = _searched(cert.seed, cert.folded, search_s)
    return f"{cert.strategy} plan by {solved_by(cert.solver, cert.status)}: {certified}, {searched}"


def split_facts(plan: Plan) -> dict[str, Any]:
    """The numbers of nodes, of cut and of replicated nodes, and the meshes of both."""
    cut = [plan.groups[node.group] for node in plan.nodes.values() if node.cuts]
    whole = [plan.groups[node.group] for node in plan.nodes.values() if not node.cuts]
    replicated = [group for group in whole if group.axes]
    return {
        "nodes": len(plan.nodes),
        "cut_nodes": len(cut),
        "cut_over": list(map(str, dict.fromkeys(cut))),
        "replicated_nodes": len(replicated),
        "replicated_on": list(map(str, dict.fromkeys(replicated))),
    }


def kept_whole(graph: Graph, rules: Mapping[str, Rule | str]) -> dict[str, Any]:
    """The operators without a rule, most FLOPs first, and their (estimated) share of all FLOPs."""
    counts, flops, known = Counter[str](), Counter[str](), 0.0
    for node in graph.nodes:
        rule = rules.get(node.name)
        if isinstance(rule, Rule):
            known += rule.flops
        elif not (is_view(node) or is_stored(node)):
            counts[node.op] += 1
            flops[node.op] += int(estimated_flops(graph, node))
    whole = flops.total()
    return {
        "kept_whole": {op: counts[op] for op in sorted(counts, key=lambda op: (-flops[op], op))},
        "kept_whole_flops_share": whole / (whole + known) if whole else 0.0,
    }


def split_sentence(summary: Mapping[str, Any]) -> str:
    """The split of a plan, without a full stop, from the facts of its summary."""
    share, counts = summary["kept_whole_flops_share"], summary["kept_whole"]
    if summary["devices"] == 1 or share < WORTH_NAMING:
        return _split(summary)
    named = ", ".join(f"{count} x {op}" for op, count in list(counts.items())[:3])
    more = f" and {len(counts) - 3} more operators" if len(counts) > 3 else ""
    return (
        f"{_split(summary)}; {named}{more} cannot be cut for want of a rule: {units.share(share)} "
        "of all FLOPs (estimated)"
    )


def _split(summary: Mapping[str, Any]) -> str:
    used, nodes, cut = summary["devices_used"], summary["nodes"], summary["cut_nodes"]
    if summary["devices"] == 1:
        return "there is one device: nothing to split"
    if not nodes:
        return "the model has no operator: nothing to split"
    if cut:
        share = units.share(summary["sharded_flops_share"])
        over = "; ".join(summary["cut_over"])
        return f"{cut} of {nodes} operators cut over {over}: {share} of the splittable FLOPs"
    if used == 1:
        return _nothing(summary)
    if summary["strategy"] == "copies":
        return f"whole operators in whole copies on {used} devices; no operator is cut"
    count, replicated = summary["replicated_nodes"], "; ".join(summary["replicated_on"])
    if count == nodes and len(summary["replicated_on"]) == 1:
        return (
            f"{_nothing(summary)}; the whole model is replicated on {replicated}; "
            "one device alone does as much"
        )
    some = f", {count} of them replicated on {replicated}" if replicated else ""
    return f"whole operators placed on {used} devices{some}; no operator is cut"


def _nothing(summary: Mapping[str, Any]) -> str:
    if summary["pinned"]:
        return "nothing was split: no plan within the constraints that splits was found cheaper"
    if summary["status"] != "optimal":
        return (
            "nothing was split: no plan that splits was found cheaper, and none was proven dearer"
        )
    return "nothing was split because communication and launches would cost more"
