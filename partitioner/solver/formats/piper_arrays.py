"""Seconds and bytes of all stages of a piper instance at once, as arrays over pairs of downsets.

Nodes of which one way is slower and smaller than the other are grouped in *classes* by the bytes
that the slower way saves: with r nodes of a class in their slower way, the r that lose least time
are best. So a way of a stage is one number r a class, and all plans that matter are covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from partitioner.solver.formats.piper import Config, Instance, Sharded
from partitioner.solver.problem import SolverError
from partitioner.solver.stages import StageOption
from partitioner.solver.stages.model import Floats

Bools = npt.NDArray[np.bool_]

#: Ways of a stage that the arrays are meant for.
MOST_WAYS = 1_000


@dataclass(frozen=True)
class Saving:
    """Nodes of which the slower way saves the same bytes.

    Attributes:
        nodes: By the time that the slower way loses, ascending.
        lost_s: That time, of each node.
        flying_bytes: What the slower way holds more (or less: negative) per micro-batch.
        resident_bytes: What it holds more besides.
    """

    nodes: tuple[int, ...]
    lost_s: tuple[float, ...]
    flying_bytes: float
    resident_bytes: float


def fast_and_small(node: int, sharded: Sharded) -> tuple[Config, ...]:
    """The configs that another does not beat: the fastest, and one that is smaller, if any is."""
    kept: list[Config] = []
    for config in sorted(sharded.configs, key=_by_time):
        if not any(
            other.flying_bytes <= config.flying_bytes and _least(other) <= _least(config)
            for other in kept
        ):
            kept.append(config)
    if len(kept) > 2:
        names = ", ".join(repr(config.name) for config in kept)
        raise SolverError(f"node {node} has more than two ways that matter: {names}")
    return tuple(kept)


def _by_time(config: Config) -> tuple[float, float, float]:
    return config.time_s, config.flying_bytes, config.resident_bytes


def _least(config: Config) -> float:
    return config.flying_bytes + config.resident_bytes


def find_savings(instance: Instance, tensor: int) -> tuple[Saving, ...]:
    """The classes of nodes on so many devices each.

    Raises:
        SolverError: They make too many ways of a stage.
    """
    classes: dict[tuple[float, float], list[tuple[float, int]]] = {}
    for node, shards in instance.nodes.items():
        if tensor not in shards:
            continue
        fast, *small = fast_and_small(node, shards[tensor])
        for config in small:
            saved = (
                config.flying_bytes - fast.flying_bytes,
                config.resident_bytes - fast.resident_bytes,
            )
            classes.setdefault(saved, []).append((config.time_s - fast.time_s, node))
    ways = np.prod([len(own) + 1 for own in classes.values()], dtype=float)
    if ways > MOST_WAYS:
        raise SolverError(
            f"nodes on {tensor} devices differ too much in what they save: a stage has {ways:.0f} "
            f"ways, {MOST_WAYS} are supported"
        )
    return tuple(
        Saving(tuple(v for _, v in sorted(own)), tuple(s for s, _ in sorted(own)), *saved)
        for saved, own in sorted(classes.items())
    )


@dataclass(frozen=True, eq=False)
class Arrays:
    """Of all stages on one tensor degree: bytes and seconds before a data degree is chosen."""

    instance: Instance
    cut_bytes: Floats  # (downsets, downsets)
    parameter_bytes: Floats  # (downsets, downsets)
    time_s: Floats  # (ways, downsets, downsets); infinite where there is no such stage
    flying_bytes: Floats
    resident_bytes: Floats

    def option(self, data: int, tensor: int) -> StageOption:
        """The stages of one data degree."""
        batch, bandwidth = self.instance.microbatches, self.instance.bandwidth_bytes_per_s
        renewed = 4 * (data - 1) / data * self.parameter_bytes / batch
        moved_s = (2 * self.cut_bytes / data + renewed) / bandwidth
        return StageOption(
            f"data {data} x tensor {tensor}",
            data * tensor,
            self.time_s / data + moved_s,
            self.resident_bytes,
            self.flying_bytes,
            degree=data,
        )


@dataclass(frozen=True)
class Layout:
    """What sums over the nodes of all stages need: which downset has which node.

    With I a part of J, a sum over J less I is the sum over J less the sum over I, and an edge
    enters the stage if its source is in I and its target in J only.
    """

    instance: Instance
    downsets: tuple[frozenset[int], ...]

    @cached_property
    def has(self) -> Floats:
        """[downset, node]: 1 where the node is in it."""
        nodes = self.instance.nodes
        return np.array([[float(v in downset) for v in nodes] for downset in self.downsets])

    @cached_property
    def nested(self) -> Bools:
        """[I, J]: whether I is a smaller part of J."""
        both = self.has @ self.has.T
        size = self.has.sum(axis=1)
        return np.asarray((both == size[:, None]) & (size[:, None] < size))

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Numbers of devices that some node can be on and that there are."""
        found = {t for shards in self.instance.nodes.values() for t in shards}
        return tuple(sorted(t for t in found if t <= self.instance.devices))

    def arrays(self, tensor: int, savings: Sequence[Saving]) -> Arrays:
        """Everything about the stages on one tensor degree."""
        shards = [of.get(tensor) for of in self.instance.nodes.values()]
        fast = [
            None if of is None else fast_and_small(v, of)[0]
            for v, of in zip(self.instance.nodes, shards, strict=True)
        ]
        missing = self._sums([float(of is None) for of in shards])
        time, flying, resident = (
            self._sums([0.0 if config is None else getattr(config, name) for config in fast])
            for name in ("time_s", "flying_bytes", "resident_bytes")
        )
        lost, saved = self._savings(savings)
        there = self.nested & (missing == 0) & np.isfinite(lost)
        return Arrays(
            self.instance,
            self._cut_bytes(tensor),
            self._sums([0.0 if of is None else of.parameter_bytes for of in shards]),
            np.where(there, time + lost, np.inf),
            np.where(there, flying + saved[:, 0, None, None], 0.0),
            np.where(there, resident + saved[:, 1, None, None], 0.0),
        )

    def _sums(self, values: Sequence[float]) -> Floats:
        """[I, J]: sum over the nodes of J less I of one value a node; 0 if I is not within J."""
        total = self.has @ np.array(values)
        return np.where(self.nested, total - total[:, None], 0.0)

    def _cut_bytes(self, tensor: int) -> Floats:
        column = {v: index for index, v in enumerate(self.instance.nodes)}
        size = len(self.downsets)
        total = np.zeros((size, size))
        for (u, v), moved in self.instance.edges.items():
            source, target = self.has[:, column[u]], self.has[:, column[v]]
            head, tail = (self.instance.nodes[end].get(tensor) for end in (v, u))
            if head is not None:
                enters = (source - target)[:, None] * target
                total += enters * (moved + head.sync_in_bytes[u])
            if tail is not None:
                leaves = (1 - source)[:, None] * (source - target)
                total += leaves * (moved + tail.sync_out_bytes[v])
        return np.where(self.nested, total, 0.0)

    def _savings(self, savings: Sequence[Saving]) -> tuple[Floats, Floats]:
        """Time lost by each way, (ways, I, J); bytes it holds more, (ways, flying and resident)."""
        size = len(self.downsets)
        lost, saved = np.zeros((1, size, size)), np.zeros((1, 2))
        for saving in savings:
            own = self._lost_s(saving)
            lost = (lost[:, None] + own).reshape(-1, size, size)
            many = np.arange(len(own))[:, None]
            held = many * np.array([saving.flying_bytes, saving.resident_bytes])
            saved = (saved[:, None] + held).reshape(-1, 2)
        return lost, saved

    def _lost_s(self, saving: Saving) -> Floats:
        """[r, I, J]: least time lost by r nodes of the class; infinite if there are not so many."""
        column = {v: index for index, v in enumerate(self.instance.nodes)}
        size = len(self.downsets)
        lost = np.full((len(saving.nodes) + 1, size, size), np.inf)
        lost[0] = 0.0
        many, total = np.zeros((size, size), dtype=np.int64), np.zeros((size, size))
        for node, seconds in zip(saving.nodes, saving.lost_s, strict=True):
            there = self.has[:, column[node]]
            start, stop = np.nonzero(self.nested & (there[:, None] < there))
            many[start, stop] += 1
            total[start, stop] += seconds
            lost[many[start, stop], start, stop] = total[start, stop]
        return lost
