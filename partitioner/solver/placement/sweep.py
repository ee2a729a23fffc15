"""The least seconds for every value that a set of nodes can have, exactly.

    f(u) = min { seconds(S) : S a set of nodes, value(S) = u },

where both are sums over the nodes inside, the nodes outside and the stars; values are whole
numbers. A star adds an amount that depends on its centre's side and on the question whether any of
its leaves is on the other side. Nodes come one by one; a table holds f for every combination of
inside and outside of the nodes that wait for others of their stars, the frontier. (It is the
dynamic programme of the knapsack by profits, on a path decomposition; model graphs are narrow.) Of
a star of several leaves only the centre waits, with one bit for the question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.solver.stages.model import Bools, Floats, Ints

Side = tuple[float, float]  #: If the centre is [outside, inside].

#: numpy arrays have at most 64 axes; so many nodes that wait would never fit anyway.
MOST_OPEN = 24


@dataclass(frozen=True)
class StarTerm:
    """The seconds and the value that a star of nodes adds."""

    centre: int
    leaves: tuple[int, ...]  #: The other nodes; none if only the centre's side matters.
    whole_s: Side  #: Seconds if all leaves are on the centre's side.
    cut_s: Side  #: Seconds if any is on the other side.
    whole_value: Side = (0.0, 0.0)  #: The value that goes with `whole_s`, whole numbers.
    cut_value: Side = (0.0, 0.0)  #: The value that goes with `cut_s`.


#: Steps of a search that a node takes in a sweep, and an entry of a table.
NODE_STEPS, ENTRY_STEPS = 90, 0.015


@dataclass(frozen=True)
class _Step:
    """Join a node to the table; axes are named, the newest first, values last."""

    node: int
    bits: int  #: How many stars begin to ask.
    cost: Floats | None  #: Seconds to add, by the axes then open; None if there are none.
    shift: Ints | None  #: Values to add; None if there are none.
    drops: tuple[int, ...]  #: Axes that are decided, one after another.


@dataclass(frozen=True)
class Sweep:
    """Nodes and stars laid out for the dynamic programme."""

    inside_s: Sequence[float]  #: Seconds of each node that is inside.
    outside_s: Sequence[float]  #: Seconds of each node that is outside.
    steps: tuple[_Step, ...]  #: One a node.
    cells: int  #: Entries of all tables together, for one value.

    def work(self, most: int) -> float:
        """Steps of a search that a sweep of so many values takes."""
        return NODE_STEPS * len(self.steps) + ENTRY_STEPS * self.cells * (most + 1)


@dataclass(frozen=True)
class Swept:
    """The least seconds of every value, and the sets of nodes that take them."""

    #: [u] of the sets of value u, infinite if there is none. The last entry is of all sets of that
    #: value and more if no star has a value, and means nothing otherwise.
    seconds: Floats
    layout: Sweep
    values: Ints  #: Of the nodes, if inside.
    #: For each axis dropped, whether inside is better, by the axes left and the value.
    inside_is_better: tuple[Bools, ...]
    #: For each node the value from which the last entry's best set comes.
    sources: tuple[Ints, ...]

    def inside(self, value: int) -> frozenset[int]:
        """The set of nodes behind `seconds[value]`."""
        sides: list[int] = []
        nodes = set()
        left = len(self.inside_is_better)
        for step, source in zip(reversed(self.layout.steps), reversed(self.sources), strict=True):
            for axis in reversed(step.drops):
                left -= 1
                sides.insert(axis, int(self.inside_is_better[left][(*sides, value)]))
            if step.shift is not None:
                at = (s if size > 1 else 0 for s, size in zip(sides, step.shift.shape, strict=True))
                value -= int(step.shift[tuple(at)])
            del sides[: step.bits]
            if not sides.pop(0):
                continue
            nodes.add(step.node)
            exact = value < len(self.seconds) - 1
            value = value - int(self.values[step.node]) if exact else int(source[tuple(sides)])
        return frozenset(nodes)


#: The seconds and values that are added for the sides of some axes, each named in the scope.
_Term = tuple[tuple[int, ...], Floats, Floats]


def lay_out(
    order: Sequence[int],
    inside_s: Sequence[float],
    outside_s: Sequence[float],
    stars: Sequence[StarTerm],
) -> Sweep | None:
    """Plan the tables of the nodes in the order; None if too many wait for one another.

    The stars are of these nodes alone; `inside_s` and `outside_s` have all nodes.
    """
    at = {node: place for place, node in enumerate(order)}
    terms: list[list[_Term]] = [[] for _ in order]  # by the place at which they are added
    for index, star in enumerate(stars):
        for place, term in _star_terms(star, -1 - index, at):
            terms[place].append(term)
    last = dict(at)  # place of the last term of each axis; it is named by its node or bit
    begins: list[list[int]] = [[] for _ in order]  # bits of stars that begin to ask
    for place, here in enumerate(terms):
        for name in (name for scope, _, _ in here for name in scope):
            if name not in last:
                begins[place].append(name)
            last[name] = place
    steps, cells = [], 0
    axes: list[int] = []
    for place, node in enumerate(order):
        axes = [*begins[place], node, *axes]
        if len(axes) > MOST_OPEN:
            return None
        cells += 1 << len(axes)
        cost, shift = _sums(terms[place], axes)
        drops = []
        for name in [name for name in axes if last[name] == place]:
            drops.append(axes.index(name))
            axes.remove(name)
        steps.append(_Step(node, len(begins[place]), cost, shift, tuple(drops)))
    return Sweep(inside_s, outside_s, tuple(steps), cells)


def _star_terms(star: StarTerm, bit: int, at: Mapping[int, int]) -> Iterator[tuple[int, _Term]]:
    """The terms of a star, each with the place of the node that completes its scope."""
    # transposed: the centre's side comes first, then the question
    seconds = np.array((star.whole_s, star.cut_s)).T
    values = np.array((star.whole_value, star.cut_value)).T
    met = [max(at[star.centre], at[leaf]) for leaf in star.leaves]
    place = max(met, default=at[star.centre])
    if not star.leaves:
        yield place, ((star.centre,), seconds[:, 0], values[:, 0])
    elif len(star.leaves) == 1:
        crossed = np.array([[0, 1], [1, 0]])  # question by the sides of centre and leaf
        pair = np.take_along_axis(seconds, crossed, 1), np.take_along_axis(values, crossed, 1)
        yield place, ((star.centre, star.leaves[0]), *pair)
    else:
        needs = np.zeros((2, 2, 2))
        needs[0, 1, 0] = needs[1, 0, 0] = math.inf
        for leaf, meeting in zip(star.leaves, met, strict=True):
            yield meeting, ((star.centre, leaf, bit), needs, np.zeros_like(needs))
        yield place, ((star.centre, bit), seconds, values)


def _sums(terms: Sequence[_Term], axes: Sequence[int]) -> tuple[Floats | None, Ints | None]:
    """Seconds and values to add, by the open axes; None where they are all 0."""
    cost, shift = np.zeros([1] * len(axes)), np.zeros([1] * len(axes))
    for scope, seconds, values in terms:
        sequence = sorted(range(len(scope)), key=lambda entry: axes.index(scope[entry]))
        wide = [2 if name in scope else 1 for name in axes]
        cost = cost + seconds.transpose(sequence).reshape(wide)
        shift = shift + values.transpose(sequence).reshape(wide)
    return (
        cost[..., None] if cost.any() else None,
        shift.astype(np.int64) if shift.any() else None,
    )


def sweep(layout: Sweep, values: Ints, most: int) -> Swept:
    """The least seconds of each value from 0 to `most`, the last one told apart.

    Each node has its value, whole and at least 0, if it is inside.
    """
    table = np.full(most + 1, math.inf)
    table[0] = 0.0
    inside_is_better: list[Bools] = []
    sources: list[Ints] = []
    for step in layout.steps:
        value = min(int(values[step.node]), most)
        table, source = _join(table, value, layout.outside_s[step.node], layout.inside_s[step.node])
        sources.append(source)
        for _ in range(step.bits):
            table = np.stack((table, table))
        if step.cost is not None:
            table = table + step.cost
        if step.shift is not None:
            _shift(table, step.shift)
        for axis in step.drops:
            out, inside = (table.take(side, axis=axis) for side in (0, 1))
            inside_is_better.append(np.asarray(inside < out))
            table = np.minimum(out, inside)
    return Swept(table, layout, values, tuple(inside_is_better), tuple(sources))


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
    """Move the rows up by the values of their stars; entries that leave the table are lost."""
    by_row = np.broadcast_to(shift, table.shape[:-1]).ravel()
    rows = table.reshape(-1, table.shape[-1])
    last = rows.shape[1] - 1
    for value in np.unique(by_row[by_row > 0]).tolist():
        shifted = np.flatnonzero(by_row == value)
        moved = np.full((len(shifted), last + 1), math.inf)
        if value < last:
            moved[:, value:last] = rows[shifted, : last - value]
        rows[shifted] = moved
