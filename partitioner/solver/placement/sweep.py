"""The least seconds for every value that a set of nodes can have, exactly.

    f(u) = min { seconds(S) : S a set of nodes, value(S) = u },

where both are sums over the nodes inside, the nodes outside and the nets; values are whole
numbers. A net adds what its centre's side and the question say whether any of its leaves is on
the other side. Nodes come one by one; a table holds f for every combination of inside and outside
of the nodes that wait for others of their nets, the frontier. (It is the dynamic programme of the
knapsack by profits, on a path decomposition; model graphs are narrow.) Of a net of several leaves
only the centre waits, with one bit for the question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Side = tuple[float, float]  #: If the centre is [outside, inside].

#: numpy arrays have at most 64 axes; so many nodes that wait would never fit anyway.
MOST_OPEN = 24


@dataclass(frozen=True)
class Net:
    """Nodes between which something is paid.

    Attributes:
        centre: A node.
        leaves: Others; none if only the centre's side matters.
        whole_s: Seconds if all leaves are on the centre's side.
        cut_s: Seconds if any is on the other side.
        whole_value: The value that goes with `whole_s`, whole numbers.
        cut_value: The value that goes with `cut_s`.
    """

    centre: int
    leaves: tuple[int, ...]
    whole_s: Side
    cut_s: Side
    whole_value: Side = (0.0, 0.0)
    cut_value: Side = (0.0, 0.0)


@dataclass(frozen=True)
class _Step:
    """One node joins the table; its axes are named, the newest first, values last.

    Attributes:
        node: The node.
        bits: How many nets begin to ask.
        cost: Seconds to add, by the axes then open; None if there are none.
        shift: Values to add; None if there are none.
        drops: Axes that are decided, one after another.
    """

    node: int
    bits: int
    cost: Floats | None
    shift: Ints | None
    drops: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """Nodes and nets laid out for the dynamic programme.

    Attributes:
        inside_s: Seconds of each node that is inside.
        outside_s: Seconds of each node that is outside.
        steps: One a node.
        cells: Entries of all tables together, for one value.
    """

    inside_s: Sequence[float]
    outside_s: Sequence[float]
    steps: tuple[_Step, ...]
    cells: int


@dataclass(frozen=True)
class Swept:
    """The least seconds of every value, and how they come about.

    Attributes:
        seconds: [u] of the sets of value u, infinite if there is none. The last entry is of all
            sets of that value and more if no net has a value, and means nothing otherwise.
        plan: What was swept.
        values: Of the nodes, if inside.
        picks: For each axis dropped, whether inside is better, by the axes left and the value.
        sources: For each node the value from which the last entry's best set comes.
    """

    seconds: Floats
    plan: Sweep
    values: Ints
    picks: tuple[npt.NDArray[np.bool_], ...]
    sources: tuple[Ints, ...]

    def inside(self, value: int) -> frozenset[int]:
        """The set of nodes behind `seconds[value]`."""
        state: list[int] = []
        found = set()
        left = len(self.picks)
        for step, source in zip(reversed(self.plan.steps), reversed(self.sources), strict=True):
            for axis in reversed(step.drops):
                left -= 1
                state.insert(axis, int(self.picks[left][(*state, value)]))
            if step.shift is not None:
                at = (s if size > 1 else 0 for s, size in zip(state, step.shift.shape, strict=True))
                value -= int(step.shift[tuple(at)])
            del state[: step.bits]
            if not state.pop(0):
                continue
            found.add(step.node)
            exact = value < len(self.seconds) - 1
            value = value - int(self.values[step.node]) if exact else int(source[tuple(state)])
        return frozenset(found)


def lay_out(
    order: Sequence[int],
    inside_s: Sequence[float],
    outside_s: Sequence[float],
    nets: Sequence[Net],
) -> Sweep | None:
    """Plan the tables; None if too many nodes wait for one another.

    Args:
        order: The nodes that take part.
        inside_s: Seconds of each node if it is inside.
        outside_s: Seconds of each node if it is outside.
        nets: Between nodes that take part.
    """
    return _Layout(order, nets).run(inside_s, outside_s)


class _Layout:
    def __init__(self, order: Sequence[int], nets: Sequence[Net]) -> None:
        self.order = order
        self.at = {node: place for place, node in enumerate(order)}
        self.last = dict(self.at)  # by name: nodes, then the bits of nets, below 0
        self.begins: list[list[int]] = [[] for _ in order]
        # of each place: scope, seconds, values
        self.tables: list[list[tuple[tuple[int, ...], Floats, Floats]]] = [[] for _ in order]
        for index, net in enumerate(nets):
            seconds, values = (net.whole_s, net.cut_s), (net.whole_value, net.cut_value)
            # transposed: the centre's side comes first, then the question
            self._net(net, -1 - index, np.array(seconds).T, np.array(values).T)

    def _net(self, net: Net, bit: int, seconds: Floats, values: Floats) -> None:
        place = max(self.at[node] for node in (net.centre, *net.leaves))
        if not net.leaves:
            self._table(place, (net.centre,), seconds[:, 0], values[:, 0])
        elif len(net.leaves) == 1:
            crossed = np.array([[0, 1], [1, 0]])  # question by the sides of centre and leaf
            pair = np.take_along_axis(seconds, crossed, 1), np.take_along_axis(values, crossed, 1)
            self._table(place, (net.centre, net.leaves[0]), *pair)
        else:
            needs = np.zeros((2, 2, 2))
            needs[0, 1, 0] = needs[1, 0, 0] = math.inf
            met = [max(self.at[net.centre], self.at[leaf]) for leaf in net.leaves]
            for leaf, meeting in zip(net.leaves, met, strict=True):
                self._table(meeting, (net.centre, leaf, bit), needs, np.zeros_like(needs))
            self.begins[min(met)].append(bit)
            self._table(place, (net.centre, bit), seconds, values)

    def _table(self, place: int, scope: tuple[int, ...], seconds: Floats, values: Floats) -> None:
        self.tables[place].append((scope, seconds, values))
        for name in scope:
            self.last[name] = max(self.last.get(name, 0), place)

    def run(self, inside_s: Sequence[float], outside_s: Sequence[float]) -> Sweep | None:
        steps, cells = [], 0
        opened: list[int] = []
        for place, node in enumerate(self.order):
            opened = [*self.begins[place], node, *opened]
            if len(opened) > MOST_OPEN:
                return None
            cells += 1 << len(opened)
            cost, shift = self._sums(place, opened)
            drops = []
            for name in [name for name in opened if self.last[name] == place]:
                drops.append(opened.index(name))
                opened.remove(name)
            steps.append(_Step(node, len(self.begins[place]), cost, shift, tuple(drops)))
        return Sweep(inside_s, outside_s, tuple(steps), cells)

    def _sums(self, place: int, opened: Sequence[int]) -> tuple[Floats | None, Ints | None]:
        cost, shift = np.zeros([1] * len(opened)), np.zeros([1] * len(opened))
        for scope, seconds, values in self.tables[place]:
            axes = sorted(range(len(scope)), key=lambda axis: opened.index(scope[axis]))
            wide = [2 if name in scope else 1 for name in opened]
            cost = cost + seconds.transpose(axes).reshape(wide)
            shift = shift + values.transpose(axes).reshape(wide)
        return (
            cost[..., None] if cost.any() else None,
            shift.astype(np.int64) if shift.any() else None,
        )


def sweep(plan: Sweep, values: Ints, most: int) -> Swept:
    """The least seconds of each value from 0 to `most`.

    Args:
        plan: Of `lay_out`.
        values: Of each node if it is inside, whole and at least 0.
        most: The last value told apart.
    """
    table = np.full(most + 1, math.inf)
    table[0] = 0.0
    picks: list[npt.NDArray[np.bool_]] = []
    sources: list[Ints] = []
    for step in plan.steps:
        value = min(int(values[step.node]), most)
        table, source = _join(table, value, plan.outside_s[step.node], plan.inside_s[step.node])
        sources.append(source)
        for _ in range(step.bits):
            table = np.stack((table, table))
        if step.cost is not None:
            table = table + step.cost
        if step.shift is not None:
            _shift(table, step.shift)
        for axis in step.drops:
            out, inside = (table.take(side, axis=axis) for side in (0, 1))
            picks.append(np.asarray(inside < out))
            table = np.minimum(out, inside)
    return Swept(table, plan, values, tuple(picks), tuple(sources))


def _join(table: Floats, value: int, outside_s: float, inside_s: float) -> tuple[Floats, Ints]:
    """A node outside or inside on a new first axis; where the last value inside comes from."""
    both = np.empty((2, *table.shape))
    np.add(table, outside_s, out=both[0])
    last = table.shape[-1] - 1
    both[1, ..., :value] = math.inf
    np.add(table[..., : last + 1 - value], inside_s, out=both[1, ..., value:])
    source = last - value + table[..., last - value :].argmin(axis=-1)
    best = np.take_along_axis(table, source[..., None], axis=-1)[..., 0]
    both[1, ..., last] = best + inside_s
    return both, source


def _shift(table: Floats, shift: Ints) -> None:
    """Move the rows up by the values of their nets; what leaves the table is lost."""
    by_row = np.broadcast_to(shift, table.shape[:-1]).ravel()
    rows = table.reshape(-1, table.shape[-1])
    last = rows.shape[1] - 1
    for value in np.unique(by_row[by_row > 0]).tolist():
        own = np.flatnonzero(by_row == value)
        moved = np.full((len(own), last + 1), math.inf)
        if value < last:
            moved[:, value:last] = rows[own, : last - value]
        rows[own] = moved
