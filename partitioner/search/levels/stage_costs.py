"""The cost of a plan of stages, counted stage by stage: all devices of a stage do equal work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, EvenResharder
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.memory.lifetimes import HEADROOM_PERCENT, MemoryPeak, with_headroom
from partitioner.cost_model.memory.torch_kernels import step_tensors
from partitioner.cost_model.prices.compute import sharded_flops_share, stored_bytes
from partitioner.cost_model.prices.overlap import beside_compute
from partitioner.cost_model.prices.reshard import Hop
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.search.levels.decode import groups, spans
from partitioner.search.levels.stages import Staged
from partitioner.search.levels.stretches import away, moved, paid

#: Seconds or bytes of each device of a stage, and what they are of: of an optimizer's step on GPUs,
#: gradients and what it takes for itself; `more` is what is held beside what the model holds at any
#: one time: what comes from and goes to other stages, and what outlives its block.
Charge = tuple[int, Literal["compute", "comm", "sent", "resident", "more", "step"], float]


def evaluation(staged: Staged, meshes: Sequence[DeviceMesh], cluster: Cluster) -> Evaluation:
    """The figures of a plan by stage.

    Loads are what `cost_model.evaluate` says of every device, where values go between stages of
    equal cuts; otherwise each stage's busiest device counts. Only buckets are not known here: small
    collectives take the least that they may (`collectives.joined_seconds`). The latency is that of
    stages that run one after the other, peaks are what is resident of a stage (weights, stored
    values, zeros), all that comes from and goes to other stages or outlives its block, and the most
    that all other values take anywhere in the model: both are upper estimates. The optimizer's step
    on GPUs is counted where it is the fullest moment of a stage.
    """
    stages = _Stages(staged, meshes, cluster)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(meshes))
    for stage, kind, amount in (*stages.charges(), *stages.steps()):
        sums[kind][stage] += amount
    devices = range(len(cluster))
    compute, comm = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
    sent = dict.fromkeys(devices, 0)
    peak = dict.fromkeys(devices, MemoryPeak(0, 0, 0, ""))
    exact_peak, executor_peak = dict(peak), dict(peak)
    steps = [node.name for node in staged.folded.whole.nodes if step_tensors(node)]
    for stage, (option, mesh) in enumerate(zip(staged.options, meshes, strict=True)):
        resident = round(sums["resident"][stage])
        passing = round(option.sharded.passing_bytes)
        passing += with_headroom(round(sums["more"][stage]))
        without = passing * 100 // HEADROOM_PERCENT
        for device in mesh.devices:
            compute[device], comm[device] = sums["compute"][stage], sums["comm"][stage]
            sent[device] = round(sums["sent"][stage])
            peak[device] = MemoryPeak(resident + passing, resident, passing, "")
            exact_peak[device] = MemoryPeak(resident + without, resident, without, "")
            step = round(sums["step"][stage]) if cluster.devices[device].is_gpu else 0
            executor_peak[device] = (
                MemoryPeak(resident + step, resident, step, steps[-1])
                if step > without
                else exact_peak[device]
            )
    return Evaluation(
        compute_s=compute,
        comm_s=comm,
        latency_s=sum(sums["compute"]) + sum(sums["comm"]),
        peak=peak,
        exact_peak=exact_peak,
        executor_peak=executor_peak if any(p.at for p in executor_peak.values()) else {},
        limit_bytes={device: cluster.devices[device].memory_bytes for device in devices},
        sent_bytes=sent,
        devices_used=sum(mesh.size() for mesh in meshes),
        sharded_flops_share=sharded_flops_share(staged.folded.whole, stages.picks),
    )


def counted(
    plans: Sequence[Staged], cluster: Cluster
) -> list[tuple[Staged, tuple[DeviceMesh, ...], Evaluation]]:
    """The plans with the devices of their stages and their figures, by load."""
    pairs = [(staged, groups(staged, cluster)) for staged in plans]
    figures = [(*pair, evaluation(*pair, cluster)) for pair in pairs]
    return sorted(figures, key=lambda entry: entry[2].step_s)


@dataclass(frozen=True)
class _Stages:
    """The nodes of a plan on the stand-ins of its stages."""

    staged: Staged
    meshes: Sequence[DeviceMesh]
    cluster: Cluster
    #: Prices of reshards from one stage to another, or within one.
    _resharders: dict[tuple[int, int], EvenResharder] = field(default_factory=dict)

    @cached_property
    def stage(self) -> Sequence[int]:
        """The stage of each node."""
        return [k for k, span in enumerate(spans(self.staged)) for _ in span]

    @cached_property
    def picks(self) -> Sequence[PlacedNode]:
        """The strategy of each node, on its stage's stand-in."""
        return [
            self.staged.options[k].sharded.picks[place]
            for k, place in zip(self.stage, self.staged.folded.places, strict=True)
        ]

    @cached_property
    def evens(self) -> Sequence[EvenMesh]:
        """The devices of each stage, and their stand-in."""
        return [
            EvenMesh(mesh, option.sharded.even.model, self.cluster)
            for mesh, option in zip(self.meshes, self.staged.options, strict=True)
        ]

    def steps(self) -> Iterator[Charge]:
        """Charges of the optimizer's step: of each update the gradient, and what it takes."""
        for placed, stage in zip(self.picks, self.stage, strict=True):
            if tensors := step_tensors(placed.node):
                counts = zip(placed.node.inputs, placed.ins, (1, tensors), strict=True)
                for value, at, count in counts:
                    assert at is not None
                    yield stage, "step", count * self._bytes(stage, value, at)

    def charges(self) -> Iterator[Charge]:
        """Charges of all nodes, weights and values."""
        graph = self.staged.folded.whole
        beside = beside_compute(graph)
        given: set[tuple[int, str, Placement]] = set()
        readers: dict[str, dict[int, dict[Placement, None]]] = defaultdict(dict)
        for node, placed, stage, place in zip(
            graph.nodes, self.picks, self.stage, self.staged.folded.places, strict=True
        ):
            yield stage, "compute", self.staged.options[stage].sharded.compute_s[place]
            for value, at in zip((*node.inputs, *node.captures), placed.ins, strict=True):
                if at is None:
                    continue
                if value in graph.producers:
                    readers[value].setdefault(stage, {})[at] = None
                elif (stage, value, at) not in given:
                    given.add((stage, value, at))
                    yield from self._given(stage, value, at)
        for node, placed, stage in zip(graph.nodes, self.picks, self.stage, strict=True):
            row = row_of(placed.node)
            for value, at in zip(node.outputs, placed.outs, strict=True):
                if at is None:
                    continue
                if row is not None and row.stored:  # with its optimizer's state
                    nbytes, dtype = self._bytes(stage, value, at), graph.types[value].dtype
                    yield stage, "resident", stored_bytes(node, dtype, nbytes, at.sharding)
                yield from self._value(value, at, stage, readers[value], beside=value in beside)

    def _given(self, stage: int, value: str, at: Placement) -> Iterator[Charge]:
        """What no node makes: a weight is resident, and so is an input as a sum with zeros."""
        if value in self.staged.folded.whole.constants or at.sharding.partial:
            yield stage, "resident", self._bytes(stage, value, at)
        if value in self.staged.folded.outliving:
            yield stage, "more", self._bytes(stage, value, at)

    def _bytes(self, stage: int, value: str, at: Placement) -> int:
        return self.evens[stage].local_bytes(at, self.staged.folded.whole.types[value].dtype)

    def _value(
        self,
        value: str,
        home: Placement,
        stage: int,
        readers: Mapping[int, Mapping[Placement, None]],
        *,
        beside: bool,
    ) -> Iterator[Charge]:
        """Each hop of the value's own stage once; each placement of another stage once."""
        graph = self.staged.folded.whole
        dtype = graph.types[value].dtype
        wanted = list(readers.get(stage, ()))
        if value in graph.outputs and home.sharding.partial:
            wanted.append(Placement(home.mesh, home.sharding.without_partial()))
        within = self._resharder(stage, stage)
        hops = [hop for want in wanted for hop in within.hops(dtype, home, want)]
        leaving = []
        for other, hop in self._across(dtype, home, stage, readers):
            there = self._resharder(stage, other).other
            assert there is not None
            if hop.after.mesh.devices[0] in there.model.devices:
                yield other, "more", there.local_bytes(hop.after, dtype)
                yield from _paid(stage, hop, self.meshes[stage].devices[0], beside=beside)
                yield from _paid(other, hop, there.device, beside=beside)
            else:
                leaving.append(hop)
        more = dict.fromkeys(hop.after for hop in leaving)
        if value in self.staged.folded.outliving:
            more |= dict.fromkeys((home, *(hop.after for hop in hops)))
        for at in more:
            yield stage, "more", self._bytes(stage, value, at)
        hops += leaving
        once: dict[Placement, Hop] = {}
        for hop in hops:
            once.setdefault(hop.after, hop)
        for after, hop in once.items():
            if hop.zeros:
                yield stage, "resident", self._bytes(stage, value, after)
            yield from _paid(stage, hop, self.meshes[stage].devices[0], beside=beside)

    def _across(
        self,
        dtype: str,
        home: Placement,
        stage: int,
        readers: Mapping[int, Mapping[Placement, None]],
    ) -> Iterator[tuple[int, Hop]]:
        """Each other stage that reads a value, with the hops to each placement that it reads."""
        for other, wants in readers.items():
            if other == stage:
                continue
            resharder = self._resharder(stage, other)
            assert resharder.other is not None
            for want in wants:
                for hop in resharder.hops(dtype, home, moved(want, resharder.other)):
                    yield other, hop

    def _resharder(self, stage: int, other: int) -> EvenResharder:
        if (stage, other) not in self._resharders:
            even = self.evens[stage]
            there = away(self.evens[other], beyond=even.model) if other != stage else None
            self._resharders[stage, other] = EvenResharder(self.cluster, even=even, other=there)
        return self._resharders[stage, other]


def _paid(stage: int, hop: Hop, device: int, *, beside: bool) -> Iterator[Charge]:
    seconds, sent = paid(hop, device, beside=beside)
    yield stage, "comm", seconds
    yield stage, "sent", sent
