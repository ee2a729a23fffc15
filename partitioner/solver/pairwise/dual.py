"""A lower bound with prices on memory, and choices read off it.

For prices y >= 0 of the memory rows no feasible choice costs less than

    min over choices of (cost + sum_t y_t * usage_t)  -  sum_t y_t * capacity_t

and the sweeps of `Messages` bound the minimum from below. Both ascend together: each sweep is
followed by a step of the prices along the usage above capacity (Polyak's step length with a target
a little above the best bound), halfway between that of the choice read off the messages and that
of the strategies weighted by how near they are to each node's best. Of each run of short rows only
the worst gets a price: neighbours in time are alike, and prices on thousands overshoot.

A choice is read off by decimation: fix a node, pass messages, repeat. Where many nodes of equal
layers share a neighbour, its strategies are often as good as each other in the messages, but only
if all layers follow. So nodes with most neighbours are fixed first, each to its best, and a few
sweeps follow before the next. While fixing costs nothing, more nodes are fixed at a time (Mezard,
Parisi and Zecchina, Science 297, 2002). Prices move on all the while, and strategies that no longer
fit into memory go.

The sweeps are sequential tree-reweighted message passing: TRW-S (Kolmogorov, "Convergent
tree-reweighted message passing for energy minimization", PAMI 28, 2006) ascends the dual of the
local-polytope relaxation by blocks: nodes are visited in order, then in reverse, each sharing out
its reparametrised cost over the chains of ascending nodes through it.

A message is stored where it arrives: `inbox[arc]` is the message of the head of the arc about the
strategies of its tail. Every strategy has an allowed pair on every edge (arc consistency), so that
all messages are finite. Forbidden pairs are infinite: no large number weakens the bound.

A choice is read off at once as a forward sweep goes: each node takes its best by its cost, its
earlier neighbours' choices and the messages of the later ones.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.model import CONFLICT, Graph, Model, peaks, positions, restrict
from partitioner.solver.pairwise.problem import Flags, Floats, Ints, index_in_group, offsets_of
from partitioner.solver.pairwise.relax import prune
from partitioner.solver.work import now_s


class Messages:
    """The messages of a graph, and sweeps over them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: First entry of each arc's message; (arcs + 1,).
        self.places = offsets_of(graph.sizes[graph.tails])
        self.inbox = np.zeros(self.places[-1])  #: All messages.
        #: One strategy a node, decided in the order of the last forward sweep.
        self.chosen = np.zeros(graph.nodes, dtype=np.int64)

    def inherit(self, former: Messages, labels: Ints, former_labels: Ints) -> None:
        """Take over another graph's messages along the same edges about the same strategies.

        Labels are the problem's strategies that those of either graph stand for; (strategies,).
        """
        old, new = former.graph, self.graph
        most = max(int(labels.max()), int(former_labels.max())) + 1
        known, wanted = (
            np.repeat(np.arange(graph.nodes), graph.sizes) * most + of
            for graph, of in ((old, former_labels), (new, labels))
        )
        strategy = positions(known, wanted)
        arc = positions(*(graph.tails * graph.nodes + graph.heads for graph in (old, new)))
        sizes = new.sizes[new.tails]
        node, arc = np.repeat(new.tails, sizes), np.repeat(arc, sizes)
        place = strategy[new.offsets[node] + index_in_group(sizes)]
        there = (place >= 0) & (arc >= 0)
        source = former.places[arc] + place - old.offsets[node]
        self.inbox[there] = former.inbox[source[there]]

    def copy(self) -> Messages:
        """A copy that can be swept while this one is."""
        other = copy.copy(self)
        other.inbox, other.chosen = self.inbox.copy(), self.chosen.copy()
        return other

    def sweep(self, unary: Floats) -> float:
        """Sweep forward and backward once at these node costs; return the bound after it."""
        _forward(self.inbox, self.places, unary, self.chosen, self.graph)
        return _backward(self.inbox, self.places, unary, self.graph)

    def costs(self, unary: Floats) -> Floats:
        """Cost of each strategy with the messages of its neighbours; (strategies,)."""
        costs = unary.copy()
        _gather(costs, self.inbox, self.places, self.graph)
        return costs

    def surplus(self, unary: Floats) -> Floats:
        """Excess of every choice with a strategy over the last sweep's bound; (strategies,).

        After the backward sweep the problem is the bound plus terms that are not negative; these
        are the terms that a strategy alone makes certain.
        """
        surplus = np.empty(len(unary))
        _surplus(surplus, self.inbox, self.places, unary, self.graph)
        return surplus


@jit
def _gather(target: Floats, inbox: Floats, places: Ints, g: Graph) -> None:
    for v in range(len(g.offsets) - 1):
        costs = target[g.offsets[v] : g.offsets[v + 1]]
        for arc in range(g.starts[v], g.starts[v + 1]):
            costs += inbox[places[arc] : places[arc] + len(costs)]


@jit
def _belief(theta: Floats, v: int, inbox: Floats, places: Ints, unary: Floats, g: Graph) -> float:
    """Reparametrised cost of a node less its least, which is returned."""
    theta[:] = unary[g.offsets[v] : g.offsets[v + 1]]
    for arc in range(g.starts[v], g.starts[v + 1]):
        message = inbox[places[arc] : places[arc] + len(theta)]
        for p in range(len(theta)):
            theta[p] += message[p]
    least = theta[0]
    for p in range(len(theta)):
        least = min(least, theta[p])
    for p in range(len(theta)):
        theta[p] -= least
    return float(least)


@jit
def _send(theta: Floats, share: float, arc: int, inbox: Floats, places: Ints, g: Graph) -> float:
    """Write the message of a node to a neighbour, its least taken out and returned."""
    size, width = len(theta), g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
    source, target, table = places[arc], places[g.back[arc]], g.tables[arc]
    out, received = inbox[target : target + width], inbox[source : source + size]
    out[:] = np.inf
    for p in range(size):
        base = share * theta[p] - received[p]
        row = g.entries[table + p * width : table + p * width + width]
        for q in range(width):
            value = base + row[q]
            out[q] = min(out[q], value)
    least = out[0]
    for q in range(width):
        least = min(least, out[q])
    for q in range(width):
        out[q] -= least
    return float(least)


@jit
def split(v: int, g: Graph) -> int:
    """First arc of a node that leads to a later node."""
    arc = g.starts[v]
    while arc < g.starts[v + 1] and g.heads[arc] < v:
        arc += 1
    return int(arc)


@jit
def _forward(inbox: Floats, places: Ints, unary: Floats, chosen: Ints, g: Graph) -> None:
    for v in range(len(g.offsets) - 1):
        theta = np.empty(g.offsets[v + 1] - g.offsets[v])
        later = split(v, g)
        chosen[v] = decide(theta, v, later, inbox, places, unary, chosen, g)
        _belief(theta, v, inbox, places, unary, g)
        share = 1.0 / max(1, later - g.starts[v], g.starts[v + 1] - later)
        for arc in range(later, g.starts[v + 1]):
            _send(theta, share, arc, inbox, places, g)


@jit
def decide(
    theta: Floats, v: int, later: int, inbox: Floats, places: Ints, unary: Floats, chosen: Ints,
    g: Graph,
) -> int:  # fmt: skip
    """The best strategy given the nodes before and the messages of the nodes after.

    `theta` takes the cost of each strategy, `later` is the node's `split`.
    """
    size = len(theta)
    theta[:] = unary[g.offsets[v] : g.offsets[v + 1]]
    for arc in range(g.starts[v], later):
        at = g.tables[g.back[arc]] + chosen[g.heads[arc]] * size
        row = g.entries[at : at + size]
        for p in range(size):
            theta[p] += min(row[p], CONFLICT)
    for arc in range(later, g.starts[v + 1]):
        theta += inbox[places[arc] : places[arc] + size]
    return int(theta.argmin())


@jit
def _backward(inbox: Floats, places: Ints, unary: Floats, g: Graph) -> float:
    bound = 0.0
    for v in range(len(g.offsets) - 2, -1, -1):
        theta = np.empty(g.offsets[v + 1] - g.offsets[v])
        later = split(v, g)
        bound += _belief(theta, v, inbox, places, unary, g)
        share = 1.0 / max(1, later - g.starts[v], g.starts[v + 1] - later)
        for arc in range(g.starts[v], later):
            bound += _send(theta, share, arc, inbox, places, g)
    return bound


@jit
def _surplus(target: Floats, inbox: Floats, places: Ints, unary: Floats, g: Graph) -> None:
    for v in range(len(g.offsets) - 1):
        surplus = target[g.offsets[v] : g.offsets[v + 1]]
        theta = np.empty(len(surplus))
        _belief(theta, v, inbox, places, unary, g)
        later = split(v, g)
        before = later - g.starts[v]
        share = 1.0 / max(1, before, g.starts[v + 1] - later)
        for p in range(len(surplus)):
            surplus[p] = (1.0 - before * share) * theta[p]
        for arc in range(g.starts[v], later):
            width = g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
            other = inbox[places[g.back[arc]] : places[g.back[arc]] + width]
            least = share * theta - inbox[places[arc] : places[arc] + len(surplus)]
            for p in range(len(surplus)):
                at = g.tables[arc] + p * width
                least[p] += (g.entries[at : at + width] - other).min()
            surplus += least - least.min()


#: The target is this much above the best bound, relative.
TARGET = 0.05
#: Sweeps before prices move, and sweeps without a better bound after which steps shrink.
WARM_UP = 5
PATIENCE = 3
SHRINK = 0.8
#: Sweeps without a better bound after which prices return to the best, with half the step that led
#: there.
RETURN = 24
#: A strategy's weight falls by e for each this share of the bound, spread over the nodes.
TEMPERATURE = 0.01
#: Sweeps at the best prices before strategies are priced out.
SETTLE = 40


class Dual:
    """Prices and messages of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        #: Their state; `messages.chosen` is the choice of the last sweep.
        self.messages = Messages(model.graph)
        self.bound = -math.inf  #: The best bound so far.
        #: Price of each memory row at the best bound; (rows,).
        self.price = np.zeros(len(model.rows.capacity))
        #: Rows that were the worst of a run of short ones at some sweep: only these have
        #: prices; (rows,).
        self.met = np.zeros(len(self.price), dtype=np.bool_)
        self._now = self.price
        self._step = self._good = 1.0
        self._stalled = 0
        self._swept = 0

    def inherit(self, former: Dual) -> None:
        """Go on from the prices and messages of another model of the same problem."""
        number, former_number = self.model.rows.number, former.model.rows.number
        shared = np.isin(number, former_number)
        place = np.searchsorted(former_number, number[shared])
        self._now = np.zeros(len(number))
        self._now[shared] = former.price[place]
        self.met[shared] = former.met[place]
        self.price, self._swept = self._now, former._swept
        self._step = self._good = former._good
        self.messages.inherit(former.messages, self.model.labels, former.model.labels)

    def copy(self) -> Dual:
        """A copy that can be swept while this one ascends."""
        other = copy.copy(self)
        other.met = self.met.copy()
        other.messages = self.messages.copy()
        return other

    def decide(self) -> Ints:
        """A choice read off at the best prices at once; one strategy a node."""
        self._offer(self.price)
        return self.messages.chosen.copy()

    def ascend(self, sweeps: int, until: float = math.inf) -> None:
        """Raise the bound, at most until this second of `now_s`."""
        for _ in range(sweeps):
            if now_s() > until:
                return
            bound = self._offer(self._now)
            self._swept += 1
            if len(self.price) and self._swept > WARM_UP:
                self._move(bound, self.model.priced(self._now))
            if self._stalled >= RETURN:
                self._good, self._stalled = self._good / 2, 0
                self._now, self._step = self.price, self._good

    def dear(self, cutoff: float) -> Flags:
        """Strategies that no choice of at most this cost takes; (strategies,)."""
        price = self.price
        for _ in range(SETTLE):
            bound = self._offer(price)
        surplus = self.messages.surplus(self.model.priced(price))
        return bound + surplus > cutoff + 1e-6 + 1e-9 * abs(cutoff)

    def _offer(self, price: Floats) -> float:
        """Sweep at these prices; the bound."""
        priced = self.model.priced(price)
        bound = self.messages.sweep(priced) - float(price @ self.model.rows.capacity)
        self._stalled += 1
        if bound > self.bound:
            self.bound, self.price, self._stalled = bound, price, 0
            self._good = self._step
        elif self._stalled % PATIENCE == 0:
            self._step *= SHRINK
        return bound

    def _move(self, bound: float, costs: Floats) -> None:
        """Step the prices along the usage above capacity."""
        # usage of each node, halfway between decided and weighted; (nodes,)
        graph, usage = self.model.graph, self.model.usage
        first = graph.offsets[:-1]
        belief = self.messages.costs(costs)
        above = belief - np.repeat(np.minimum.reduceat(belief, first), graph.sizes)
        width = TEMPERATURE * max(abs(self.bound), 1.0) / len(first)
        weight = np.exp(-np.minimum(above / width, 50.0))
        soft = np.add.reduceat(weight * usage, first) / np.add.reduceat(weight, first)
        mean: Floats = (soft + usage[first + self.messages.chosen]) / 2
        over = self.model.rows.load(mean) - self.model.rows.capacity
        self.met[peaks(over)] = True
        over = np.where(self.met & ((self._now > 0) | (over > 0)), over, 0.0)
        square = float(over @ over)
        if square > 0:
            climb = max(TARGET * abs(self.bound), self.bound - bound)
            self._now = np.maximum(0.0, self._now + self._step * climb / square * over)


#: Sweeps after each step.
SWEEPS = 5
#: Nodes fixed first, of how many; twice as many each time that costs less than `FREE` of the bound.
FIRST = 1000
FREE = 1e-4


def dive(dual: Dual, noise: Floats, until: float = math.inf) -> Ints | None:
    """A choice; one strategy a node. Where nothing allowed is left, a forbidden pair is taken.

    `noise` is by how much the neighbours of each node count more. The dual does not change. None if
    it is later than the second `until` of `now_s`.
    """
    rest, batch = _within(dual, dual.model), 1
    while (undecided := np.flatnonzero(rest.model.graph.sizes > 1)).size:
        if now_s() > until:
            return None
        degree = (np.diff(rest.model.graph.starts) * (1 + noise))[undecided]
        hubs = undecided[np.argsort(-degree, kind="stable")]  # most neighbours first
        count = max(batch, batch * len(undecided) // FIRST)
        smaller = _fixed(rest, hubs[:count])
        if smaller is None and count > 1:
            batch, smaller = 1, _fixed(rest, hubs[:1])
        if smaller is None:
            smaller = _fixed(rest, hubs[:1], forbid=True)
        if smaller is None:
            return dual.model.within(rest.model.original(rest.decide()))
        after = _within(rest, smaller)
        batch = 2 * batch if after.bound - rest.bound < FREE * abs(rest.bound) else 1
        rest = after
    chosen = np.zeros(rest.model.graph.nodes, dtype=np.int64)
    return dual.model.within(rest.model.original(chosen))


def _within(dual: Dual, smaller: Model) -> Dual:
    """The dual of a smaller model, a few sweeps after it took over the larger one's."""
    inner = Dual(smaller)
    inner.inherit(dual)
    inner.ascend(SWEEPS)
    return inner


def _fixed(dual: Dual, nodes: Ints, *, forbid: bool = False) -> Model | None:
    """The model once some nodes take their best (or may not); None if that cannot be."""
    graph, belief = dual.model.graph, dual.messages.costs(dual.model.priced(dual.price))
    keep = np.ones(len(belief), dtype=np.bool_)
    for v in nodes:
        first, last = graph.offsets[v : v + 2]
        keep[first:last] = forbid
        keep[first + belief[first:last].argmin()] = not forbid
    smaller = prune(restrict(dual.model, keep))
    return None if smaller is None or (smaller.rows.capacity < 0).any() else smaller
