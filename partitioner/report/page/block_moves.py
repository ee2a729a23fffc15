"""The cost of a plan with a whole block elsewhere, or not cut over an axis.

Blocks are those of the page's graph. A block moves to the groups, or stages, that it exchanges
values with; all other nodes keep their decisions, and the referee prices the changed plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.foundations import units
from partitioner.ir.errors import IRError
from partitioner.ir.plan import NodePlan
from partitioner.report.blocks import Block, block_label
from partitioner.report.planned import Planned
from partitioner.report.schema import BlockMoveRow
from partitioner.report.stages import stage_text

#: Nodes of the graph times changed plans: more are not priced, for each makes a schedule.
MAX_WORK = 40_000
#: A block belongs to a group that runs so large a share of its nodes.
BELONGS = 0.9


def block_moves(result: Planned, outer: Sequence[Block]) -> list[BlockMoveRow]:
    """The changes of whole blocks that the plan's rules allow, the cheapest that fits first."""
    graph = result.graph
    names = [node.name for node in graph.nodes]
    moves: list[BlockMoveRow] = []
    tried = 0
    for block, at, to, nodes in _changes(result, outer):
        tried += 1
        if tried * len(graph.nodes) > MAX_WORK:
            break
        changed = replace(result.plan, nodes={**result.plan.nodes, **nodes}, certificate=None)
        try:
            figures = evaluate(graph, changed, result.cluster)
        except IRError:  # the order of stages, an operator without a rule, a part of no elements
            continue
        change = figures.cost(result.objective) - result.cost
        moves.append(
            BlockMoveRow(
                label=block_label(block, names),
                first=block.first,
                last=block.last,
                at=at,
                to=to,
                change=change,
                fits=figures.fits_exactly,
                reason=why(result.evaluation, figures, change, result.objective),
            )
        )
    return sorted(moves, key=lambda move: (not move["fits"], move["change"]))


def _changes(
    result: Planned, outer: Sequence[Block]
) -> Iterator[tuple[Block, str, str, Mapping[str, NodePlan]]]:
    """The blocks with what may change: the block, its group, the change, its nodes' decisions.

    Of equal blocks of a group one stands for all where an axis is left out.
    """
    plan, names = result.plan, [node.name for node in result.graph.nodes]
    seen: set[tuple[int, int, str]] = set()
    for block in outer:
        members = names[block.first : block.last + 1]
        group, count = Counter(plan.nodes[name].group for name in members).most_common(1)[0]
        if count < BELONGS * len(members):
            continue
        own = [name for name in members if plan.nodes[name].group == group]
        at = _where(result, group)
        for other in _neighbours(result, members, group):
            keeps = plan.groups[other].axes == plan.groups[group].axes
            moved = {n: NodePlan(other, plan.nodes[n].cuts if keeps else {}) for n in own}
            yield block, at, _where(result, other), moved
        for axis, _ in plan.groups[group].axes:
            kind = (block.kind, group, axis)
            if block.kind >= 0 and kind in seen:
                continue
            seen.add(kind)
            whole = {}
            for name in own:
                cuts = plan.nodes[name].cuts.items()
                left = {factor: cut for factor, cut in cuts if axis not in cut.axes}
                whole[name] = replace(plan.nodes[name], cuts=left)
            if any(plan.nodes[name] != node for name, node in whole.items()):
                yield block, at, f"not cut over {axis}", whole


def _neighbours(result: Planned, members: Sequence[str], group: int) -> list[int]:
    """Other groups that make what the block reads, or read what it makes."""
    graph, nodes = result.graph, result.plan.nodes
    near: dict[int, None] = {}
    for name in members:
        node = graph.by_name[name]
        sources = (graph.producers.get(value) for value in node.reads)
        readers = (reader for value in node.writes for reader in graph.consumers[value])
        for other in (*sources, *readers):
            if other is not None and nodes[other.name].group != group:
                near[nodes[other.name].group] = None
    return list(near)


def _where(result: Planned, group: int) -> str:
    plan = result.plan
    stage = stage_text(plan, plan.stages[group])
    return ", ".join(filter(None, (stage, str(plan.groups[group]))))


def why(old: Evaluation, new: Evaluation, change: float, objective: str) -> str:
    """The reasons why a changed plan costs more: memory, bytes sent, the busiest device."""
    if not new.fits_exactly:
        over = {d: held - new.limit_bytes[d] for d, held in new.needed_bytes.items()}
        device = max(over, key=over.__getitem__)
        return f"device {device} would be {units.size(over[device])} over its memory"
    sent = sum(new.sent_bytes.values()) - sum(old.sent_bytes.values())
    parts = []
    if change < 0:
        parts.append("better than the plan: within the gap that the search left")
    elif change > 0 and objective == "memory":
        held = new.needed_bytes
        parts.append(f"device {max(held, key=held.__getitem__)} holds more")
    elif change > 0:
        first, second = (max(of.load_s, key=of.load_s.__getitem__) for of in (old, new))
        more = {
            "communicates": new.comm_s[second] - old.comm_s[second],
            "computes": new.compute_s[second] - old.compute_s[second],
        }
        verb = max(more, key=more.__getitem__)
        becomes = f"device {second} becomes the bottleneck, "
        where = f"device {second}, the bottleneck, " if first == second else becomes
        if more[verb] > 0:
            parts.append(f"{where}{verb} {units.seconds(more[verb])} more")
    if sent > 0:
        parts.append(f"{units.size(sent)} more are sent")
    return ", ".join(parts) or "costs the same"
