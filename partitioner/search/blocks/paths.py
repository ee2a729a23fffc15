"""The cheapest path over a graph's order within the memory of one device, some of it in blocks.

A path is of steps, each of which holds bytes while it runs and keeps some of them for the rest of
the path. What it holds beside what steps before it keep is within the room.

Each node of a path runs as it is, its constants held throughout, or is in a stretch that runs in
blocks. What lives at the border of a stretch is whole, so the bytes of a stretch depend on it
alone, and the cheapest path is found by going along the order once, for each share of the memory
that is set apart: for constants that stay, and for the constants of the block that is loaded next.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from partitioner.cost_model.cluster.topology import DeviceSpec
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.search.blocks.runs import Option, Runs
from partitioner.search.request import Budget
from partitioner.solver.work import Work

#: Shares of the constants that may stay, and of the memory for those of the next block.
STAYING = (1.0, 0.5, 0.25, 0.125, 0.0)
NEXT = (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
#: Shares of the constants of a module that a stage may have, all of which stay.
STAGE_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
#: Shares of the memory that paths may fill: bytes inside blocks are counted as if their parts were
#: equal, and the referee may refuse a path that fills all.
MARGINS = (1.0, 0.95, 0.88)
#: Most positions at which a stretch may begin or end; of longer graphs those where least lives.
MOST_BORDERS = 96
#: Most positions at which a stage may begin: of as many equal runs of nodes, where least lives.
MOST_STARTS = 16
#: Most paths to a position that are followed: where constants of many sizes may stay or be loaded,
#: the paths of which none is both cheaper and lighter grow with the number of subsets.
MOST_PATHS = 64
#: Pricing runs may take one of so many equal shares of the seconds: two thirds.
PRICING_SHARES = 1.5

Run = TypeVar("Run")


class Step(NamedTuple, Generic[Run]):
    """A way from a position to a later one."""

    stop: int  #: The later position.
    seconds: float
    held_bytes: int  #: Most bytes that it holds.
    kept_bytes: int  #: Of these, those that are held behind it.
    run: Run | None = None  #: What it is; None for a node as it is.


class Path(NamedTuple, Generic[Run]):
    """The way from the first position to another one."""

    seconds: float = 0.0
    kept_bytes: int = 0
    runs: tuple[Run, ...] = ()


def cheapest(
    steps: Mapping[int, Sequence[Step[Run]]], begin: int, stops: Collection[int], room: float
) -> Mapping[int, Path[Run]]:
    """The cheapest path within the room from a position to each stop that has one.

    Steps are by the position at which they begin, and the last stop ends all paths.
    """
    paths: dict[int, list[Path[Run]]] = {begin: [Path()]}
    found = {}
    for at in range(begin, max(stops) + 1):
        here = undominated(paths.pop(at, ()))
        if here and at in stops:
            found[at] = here[0]
        for path in here:
            for step in steps.get(at, ()):
                if path.kept_bytes + step.held_bytes <= room:
                    runs = path.runs if step.run is None else (*path.runs, step.run)
                    kept = path.kept_bytes + step.kept_bytes
                    longer = Path(path.seconds + step.seconds, kept, runs)
                    paths.setdefault(step.stop, []).append(longer)
    return found


def undominated(paths: Sequence[Path[Run]]) -> Sequence[Path[Run]]:
    """The paths than which none is both cheaper and keeps less, the cheapest first.

    Of more than `MOST_PATHS` it keeps so many, the cheapest and the lightest among them.
    """
    front: list[Path[Run]] = []
    for path in sorted(paths, key=lambda path: (path.seconds, path.kept_bytes, len(path.runs))):
        if not front or path.kept_bytes < front[-1].kept_bytes:
            front.append(path)
    if len(front) <= MOST_PATHS:
        return front
    return [front[i * (len(front) - 1) // (MOST_PATHS - 1)] for i in range(MOST_PATHS)]


@dataclass(frozen=True)
class PathSearch:
    """The paths of a graph on devices of one kind."""

    runs: Runs  #: The graph's runs on one such device.
    limit: int  #: Bytes of memory of a device.
    devices: int  #: Number of all devices.
    options: Sequence[Option]  #: The runs in blocks that may fit.
    complete: bool  #: Whether all were priced within the budget.
    starts: Sequence[int]  #: Positions at which stages may begin, ascending, the first 0.
    work: Work  #: Of the search: behind its clock each path is looked for with one share of bytes.
    _from: dict[tuple[int, float], dict[int, Path[Option]]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Runs, spec: DeviceSpec, devices: int, budget: Budget) -> PathSearch:
        """Price the runs in blocks."""
        limit = spec.memory_bytes
        pricing = replace(budget, work=budget.work.of_the_clock(PRICING_SHARES))
        options, complete = _options(runs, limit, devices, pricing)
        starts, count = [0], len(runs.graph.nodes) - 1
        for i in range(MOST_STARTS if devices > 1 else 0):
            some = range(1 + i * count // MOST_STARTS, 1 + (i + 1) * count // MOST_STARTS)
            starts += [min(some, key=lambda at: runs.around(at, at)[1])] if some else []
        return cls(runs, limit, devices, options, complete, starts, budget.work)

    def _shares(self) -> Iterator[tuple[float, float]]:
        """Shares of the constants that stay, and of the memory for those of the next block."""
        if executor_of(self.runs.graph).loads_blocks:
            return itertools.product(STAYING, NEXT)
        return ((share, 0.0) for share in (STAGE_SHARES if self.devices > 1 else STAYING[:1]))

    def paths_of_all(self) -> Iterator[tuple[float, Path[Option]]]:
        """Paths over the whole graph, with the share of the memory that each may fill."""
        count = len(self.runs.graph.nodes)
        for margin in MARGINS:
            for share, ahead in self._shares():
                paths = self._paths(0, margin, share, ahead, (count,))
                if count in paths:
                    yield margin, paths[count]

    def paths_from(self, begin: int, margin: float) -> Mapping[int, Path[Option]]:
        """The cheapest path from a position to each at which a stage may end."""
        if (begin, margin) in self._from:
            return self._from[begin, margin]
        best = self._from[begin, margin] = dict[int, Path[Option]]()
        stops = (*(stop for stop in self.starts if stop > begin), len(self.runs.graph.nodes))
        for share, ahead in self._shares():
            if best and self.work.late:
                break
            for stop, path in self._paths(begin, margin, share, ahead, stops).items():
                if stop not in best or path.seconds < best[stop].seconds:
                    best[stop] = path
        return best

    def _paths(
        self, begin: int, margin: float, share: float, ahead: float, stops: Sequence[int]
    ) -> Mapping[int, Path[Option]]:
        """The cheapest path from a position to each stop that has one.

        It holds a share of the constants, and bytes of those of the next block, `ahead`.
        """
        room, count = int(self.limit * margin), stops[-1]
        staying = int(share * self.runs.constant_bytes(0, len(self.runs.graph.nodes)))
        next_bytes = int(ahead * self.limit)
        # Of what a stage receives, the largest lies there twice as it arrives.
        arriving = self.runs.around(begin, begin)[1] + self.runs.largest_at(begin)
        if begin and with_headroom(arriving) > room:
            return {}
        steps = self._steps(range(begin, count), room - staying, staying, next_bytes)
        return cheapest(steps, begin, stops, staying)

    def _steps(
        self, span: range, room: int, staying: int, ahead: int
    ) -> Mapping[int, Sequence[Step[Option]]]:
        """The nodes and stretches of a span that fit the room, with the constants that stay."""
        runs, streams = self.runs, executor_of(self.runs.graph).loads_blocks
        # Where all constants of a module stay, they are not counted: layers may share them.
        counts = streams or staying < runs.constant_bytes(0, len(self.runs.graph.nodes))
        steps: dict[int, list[Step[Option]]] = {}
        for at in span:
            more = ahead if streams and at > span.start else 0
            if with_headroom(int(runs.activation_bytes[at])) + more <= room:
                own = runs.constant_bytes(at, at + 1) if counts else 0
                steps[at] = [Step(at + 1, runs.seconds[at], own, own)]
        for option in self.options:
            if option.start not in span or option.stop > span.stop:
                continue
            held = with_headroom(option.activation_bytes)
            if streams:
                held += option.constant_bytes + ahead
            if held <= room and (not streams or option.constant_bytes <= ahead):
                stay = option.staying_bytes if streams else 0
                if counts and not streams:
                    stay = runs.constant_bytes(option.start, option.stop)
                step = Step(option.stop, option.seconds, stay, stay, option)
                steps.setdefault(option.start, []).append(step)
        return steps


def _options(runs: Runs, limit: int, devices: int, budget: Budget) -> tuple[list[Option], bool]:
    """The runs in blocks that may fit one of so many devices, each of so many bytes."""
    graph, count = runs.graph, len(runs.graph.nodes)
    total = runs.constant_bytes(0, count)
    streams = executor_of(graph).loads_blocks
    room = limit if streams else limit - total // devices
    needs = [
        with_headroom(int(runs.activation_bytes[at]))
        + (2 * runs.constant_bytes(at, at + 1) if streams else 0)
        for at in range(count)
    ]
    # Nodes that do not fit as they are; with constants that stay, if these leave most of the room.
    hot = [need > (limit - total if 2 * total < limit else limit) for need in needs]
    borders: Sequence[int] = range(count + 1)
    if count >= MOST_BORDERS:
        inner = sorted(range(1, count), key=lambda at: (runs.around(at, at)[1], at))
        borders = sorted({0, count, *inner[: MOST_BORDERS - 2]})
    options: list[Option] = []
    most_bytes = 1 + room * 100 // with_headroom(100)
    # Short and long stretches in turn, so that a search that is stopped has seen both.
    lengths = sorted(range(1, len(borders)), key=lambda n: min(n, len(borders) - n))
    few = total if streams else 0
    enough_bytes = most_bytes // 2 if 8 * few > limit else most_bytes * 9 // 10
    for length in lengths:
        for start, stop in zip(borders, borders[length:], strict=False):
            if budget.work.late:
                return options, False
            most = int(runs.activation_bytes[start:stop].max())
            if 4 * few > limit and with_headroom(most) <= limit:
                option = runs.as_one(start, stop)
                if option.constant_bytes <= limit:
                    options.append(option)
            if any(hot[start:stop]):
                options += runs.cut(start, stop, most_bytes, enough_bytes)
    return options, True
