"""Groups of devices that are alike: which they are, and the one order in which plans use them."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.solver.problem import Problem


def symmetric_groups(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The interchangeable sets, less groups whose choices are not like the others'.

    A pin, or a choice that presolve removed in one group only, breaks the symmetry of a group.
    """
    found = []
    for groups in problem.interchangeable:
        alike: dict[object, list[int]] = {}
        for group in groups:
            alike.setdefault(_signature(problem, group), []).append(group)
        found += [tuple(members) for members in alike.values() if len(members) > 1]
    return tuple(found)


def _signature(problem: Problem, group: int) -> tuple[object, ...]:
    used = {
        device
        for choices in problem.nodes
        for choice in choices
        if choice.group == group
        for device, load in enumerate(choice.load_s)
        if load > 0
    }
    return (
        tuple(sorted(problem.limit_bytes[device] for device in used)),
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
    return tuple(_moved(problem, node, choice, rename) for node, choice in enumerate(chosen))


def _moved(problem: Problem, node: int, choice: int, rename: dict[int, int]) -> int:
    """The choice that stands for this one in the renamed group: as many-th of its group."""
    group = problem.nodes[node][choice].group
    of_group: dict[int, list[int]] = {}
    for index, option in enumerate(problem.nodes[node]):
        of_group.setdefault(option.group, []).append(index)
    place = of_group[group].index(choice)
    return of_group[rename.get(group, group)][place]
