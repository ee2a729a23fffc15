"""Interchangeable device groups, and the one order in which plans use them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from partitioner.solver.problem import Problem


def symmetric_groups(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The interchangeable sets, less groups whose choices differ from the others'.

    A pin, or a choice that presolve removed in one group only, breaks the symmetry of a group.
    """
    symmetric = []
    for groups in problem.interchangeable:
        by_signature: dict[object, list[int]] = {}
        for group in groups:
            by_signature.setdefault(_signature(problem, group), []).append(group)
        symmetric += [tuple(members) for members in by_signature.values() if len(members) > 1]
    return tuple(symmetric)


def group_classes(problem: Problem, among: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Sort groups by class: interchangeable ones together, any other by itself."""
    sets = [tuple(g for g in members if g in among) for members in symmetric_groups(problem)]
    classes = tuple(members for members in sets if members)
    joined = {group for members in classes for group in members}
    return (*classes, *((group,) for group in sorted(among) if group not in joined))


def group_devices(problem: Problem, group: int) -> frozenset[int]:
    """The devices that a group's choices load."""
    loads = (c.load_s for choices in problem.nodes for c in choices if c.group == group)
    return frozenset(d for load in loads for d, seconds in enumerate(load) if seconds > 0)


def _signature(problem: Problem, group: int) -> tuple[object, ...]:
    return (
        tuple(sorted(problem.limit_bytes[device] for device in group_devices(problem, group))),
        *(
            tuple(tuple(sorted(choice.load_s)) for choice in choices if choice.group == group)
            for choices in problem.nodes
        ),
    )


def rank_nodes(problem: Problem) -> list[int]:
    """Nodes by falling least load: the order in which groups are opened."""
    weight = [min(sum(choice.load_s) for choice in choices) for choices in problem.nodes]
    return sorted(range(len(weight)), key=lambda node: (-weight[node], node))


def canonical(problem: Problem, chosen: Sequence[int]) -> tuple[int, ...]:
    """The plan with interchangeable groups renamed in the order in which nodes open them."""
    rename: dict[int, int] = {}
    for groups in symmetric_groups(problem):
        used = [problem.nodes[node][chosen[node]].group for node in rank_nodes(problem)]
        order = list(dict.fromkeys([*(g for g in used if g in groups), *groups]))
        rename.update(zip(order, groups, strict=True))
    return tuple(_renamed(problem, node, choice, rename) for node, choice in enumerate(chosen))


def _renamed(problem: Problem, node: int, choice: int, rename: dict[int, int]) -> int:
    """The choice of the renamed group that stands for this one: the one of the same rank in it."""
    group = problem.nodes[node][choice].group
    of_group: dict[int, list[int]] = {}
    for index, option in enumerate(problem.nodes[node]):
        of_group.setdefault(option.group, []).append(index)
    rank = of_group[group].index(choice)
    return of_group[rename.get(group, group)][rank]
