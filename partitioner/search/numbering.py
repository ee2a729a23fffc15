"""Devices of a plan numbered in the order of their first use, where a cluster has equal ones.

Two devices are interchangeable if they have one specification and an exchange of them, or of whole
groups of a level of links, leaves every link what it was. Costs stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan
from partitioner.strategies.constraints import Constraints

#: The number of an interchangeable group among the kinds of its level.
Kind = tuple["int | Kind", ...]


def in_order_of_use(plan: Plan, cluster: Cluster, constraints: Constraints) -> Plan:
    """The plan with interchangeable devices numbered in the order of their first use.

    Devices that pins name keep their numbers, and so do all of a plan that is kept.
    """
    if constraints.plan is not None:
        return plan
    pinned = {device for pin in constraints.pins for device in pin.devices}
    order = tuple(dict.fromkeys(node.group for node in plan.nodes.values()))
    used = (device for group in order for device in plan.groups[group].devices)
    first_use = tuple(dict.fromkeys(used))
    numbers = numbers_by_use(cluster, first_use, pinned)
    if all(numbers[device] == device for device in first_use):
        return plan
    return _renumbered(plan, order, numbers)


def _renumbered(plan: Plan, order: Sequence[int], numbers: Mapping[int, int]) -> Plan:
    """The plan on other devices, its groups in this order and then those that no node is on."""
    order = (*order, *(group for group in range(len(plan.groups)) if group not in order))
    place = {old: new for new, old in enumerate(order)}
    meshes = (plan.groups[old] for old in order)
    pipeline = plan.pipeline
    if pipeline is not None:
        pipeline = replace(pipeline, stages=tuple(pipeline.stages[old] for old in order))
    return replace(
        plan,
        groups=tuple(DeviceMesh(m.axes, tuple(numbers[d] for d in m.devices)) for m in meshes),
        nodes={name: replace(node, group=place[node.group]) for name, node in plan.nodes.items()},
        pipeline=pipeline,
    )


def numbers_by_use(
    cluster: Cluster, first_use: Sequence[int], fixed: Collection[int] = ()
) -> dict[int, int]:
    """New numbers of devices: the interchangeable ones ascend in the order of their first use.

    Args:
        cluster: The devices.
        first_use: The devices that are used, in the order of their first use.
        fixed: Devices that keep their numbers.

    Returns:
        The new number of every device.
    """
    rank = {device: position for position, device in enumerate(first_use)}
    blocks = _Blocks(cluster, rank, frozenset(fixed))
    return dict(blocks.matched(len(cluster.levels), 0, 0))


@dataclass(frozen=True)
class _Blocks:
    """The groups of each level of a cluster; those of level 0 are single devices."""

    cluster: Cluster
    rank: Mapping[int, int]
    fixed: frozenset[int]

    def size(self, level: int) -> int:
        """Devices of one group."""
        return self.cluster.levels[level - 1].size if level else 1

    def kind(self, level: int, start: int) -> Kind:
        """Equal for interchangeable groups."""
        if not level:
            specification = self.cluster.first_of_spec[self.cluster.devices[start]]
            return specification, start if start in self.fixed else -1
        return tuple(sorted(self.kind(level - 1, inner) for inner in self._inner(level, start)))

    def _inner(self, level: int, start: int) -> range:
        return range(start, start + self.size(level), self.size(level - 1))

    def _use(self, level: int, start: int) -> int:
        """Position of the group's first use; after all others if it is not used."""
        devices = range(start, start + self.size(level))
        return min(self.rank.get(device, len(self.rank)) for device in devices)

    def matched(self, level: int, old: int, new: int) -> list[tuple[int, int]]:
        """Old and new number of each device of a group that takes the place of an equal one."""
        if not level:
            return [(old, new)]
        places: dict[Kind, list[int]] = {}
        for inner in reversed(self._inner(level, new)):
            places.setdefault(self.kind(level - 1, inner), []).append(inner)
        by_use = sorted(self._inner(level, old), key=lambda inner: self._use(level - 1, inner))
        pairs = ((inner, places[self.kind(level - 1, inner)].pop()) for inner in by_use)
        matches = (self.matched(level - 1, inner, place) for inner, place in pairs)
        return list(itertools.chain.from_iterable(matches))
