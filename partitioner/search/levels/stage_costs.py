"""What a plan of stages costs, counted stage by stage: all devices of a stage do alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import sharded_flops_share, stored_bytes
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.even_mesh import EvenMesh, EvenResharder
from partitioner.cost_model.memory import HEADROOM_PERCENT, MemoryPeak
from partitioner.cost_model.overlap import beside_compute
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.search.levels.decode import groups, spans
from partitioner.search.levels.stages import Staged
from partitioner.search.levels.stretches import away, moved, paid


def evaluation(staged: Staged, meshes: Sequence[DeviceMesh], cluster: Cluster) -> Evaluation:
    """The figures of a plan by stage.

    Loads are what `cost_model.evaluate` says of every device, where values go between stages of
    equal cuts; otherwise each stage's busiest device counts. The latency is that of stages that
    run one after the other, peaks are what is resident of a stage (weights, stored values, zeros)
    and the most that all other values take anywhere in the model: both are upper estimates.
    """
    counted = _Count(staged, meshes, cluster).run()
    devices = range(len(cluster))
    compute, comm = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
    sent = dict.fromkeys(devices, 0)
    peak = dict.fromkeys(devices, MemoryPeak(0, 0, 0, ""))
    bare = dict(peak)
    for index, (option, mesh) in enumerate(zip(staged.options, meshes, strict=True)):
        weights, passing = round(counted.weights[index]), round(option.sharded.passing_bytes)
        without = passing * 100 // HEADROOM_PERCENT
        for device in mesh.devices:
            compute[device], comm[device] = counted.compute_s[index], counted.comm_s[index]
            sent[device] = round(counted.sent[index])
            peak[device] = MemoryPeak(weights + passing, weights, passing, "")
            bare[device] = MemoryPeak(weights + without, weights, without, "")
    return Evaluation(
        compute_s=compute,
        comm_s=comm,
        latency_s=sum(counted.compute_s) + sum(counted.comm_s),
        peak=peak,
        exact_peak=bare,
        limit_bytes={device: cluster.devices[device].memory_bytes for device in devices},
        sent_bytes=sent,
        devices_used=sum(mesh.size() for mesh in meshes),
        sharded_flops_share=sharded_flops_share(counted.picks),
    )


def cheapest(
    found: Sequence[Staged], cluster: Cluster
) -> tuple[Staged, tuple[DeviceMesh, ...], Evaluation]:
    """The plan of least load, counted and not estimated, with the devices of its stages."""
    counted = []
    for staged in found:
        meshes = groups(staged, cluster)
        counted.append((staged, meshes, evaluation(staged, meshes, cluster)))
    return min(counted, key=lambda entry: entry[2].step_s)


@dataclass
class _Count:
    """Sums by stage: seconds, bytes of weights, bytes sent."""

    staged: Staged
    meshes: Sequence[DeviceMesh]
    cluster: Cluster

    def run(self) -> _Count:
        """Count everything."""
        staged, count = self.staged, len(self.meshes)
        self.graph = staged.folded.whole
        self.beside = beside_compute(self.graph)
        self.compute_s, self.comm_s = [0.0] * count, [0.0] * count
        self.weights, self.sent = [0.0] * count, [0.0] * count
        self.stage = [k for k, span in enumerate(spans(staged)) for _ in span]
        self.picks: list[PlacedNode] = [
            staged.options[k].sharded.picks[place]
            for k, place in zip(self.stage, staged.folded.places, strict=True)
        ]
        self.within = [
            EvenResharder(self.cluster, even=self._even(k)) for k in range(len(self.meshes))
        ]
        self.between: dict[tuple[int, int], EvenResharder] = {}
        held: set[tuple[int, str, Placement]] = set()
        readers: dict[str, dict[int, dict[Placement, None]]] = defaultdict(dict)
        for position, placed in enumerate(self.picks):
            stage, place = self.stage[position], staged.folded.places[position]
            self.compute_s[stage] += staged.options[stage].sharded.compute_s[place]
            node = self.graph.nodes[position]
            for value, at in zip((*node.inputs, *node.captures), placed.ins, strict=True):
                if at is None:
                    continue
                if value in self.graph.producers:
                    readers[value].setdefault(stage, {})[at] = None
                elif (stage, value, at) not in held and self._stays(value, at):
                    held.add((stage, value, at))
                    nbytes = self._even(stage).local_bytes(at, self.graph.types[value].dtype)
                    self.weights[stage] += nbytes
        for position, placed in enumerate(self.picks):
            row = row_of(placed.node)
            for value, at in zip(self.graph.nodes[position].outputs, placed.outs, strict=True):
                if at is not None:
                    if row is not None and row.stored:
                        self._store(position, value, at)
                    self._value(value, at, self.stage[position], readers[value])
        return self

    def _stays(self, value: str, at: Placement) -> bool:
        """Whether what no node makes is resident: a weight, or an input as a sum with zeros."""
        return value in self.graph.constants or bool(at.sharding.partial)

    def _store(self, position: int, value: str, at: Placement) -> None:
        """A stored value with its optimizer's state."""
        stage, dtype = self.stage[position], self.graph.types[value].dtype
        nbytes = self._even(stage).local_bytes(at, dtype)
        self.weights[stage] += stored_bytes(self.graph.nodes[position], dtype, nbytes)

    def _even(self, stage: int) -> EvenMesh:
        option = self.staged.options[stage]
        return EvenMesh(self.meshes[stage], option.sharded.even.model, self.cluster)

    def _value(
        self,
        value: str,
        home: Placement,
        stage: int,
        readers: Mapping[int, Mapping[Placement, None]],
    ) -> None:
        """Each hop of the value's own stage once; each placement of another stage once."""
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        done: set[Placement] = set()
        wanted = list(readers.get(stage, ()))
        if value in self.graph.outputs and home.sharding.partial:
            wanted.append(Placement(home.mesh, home.sharding.without_partial()))
        hops = [hop for want in wanted for hop in self.within[stage].hops(dtype, home, want)]
        for other, wants in readers.items():
            if other != stage:
                resharder = self._resharder(stage, other)
                there = resharder.other
                assert there is not None
                for want in wants:
                    for hop in resharder.hops(dtype, home, moved(want, there)):
                        if hop.after.mesh.devices[0] not in there.model.devices:
                            hops.append(hop)
                            continue
                        self._pay(stage, *paid(hop, resharder.even.device, beside=beside))
                        self._pay(other, *paid(hop, there.device, beside=beside))
        for hop in hops:
            if hop.after not in done:
                done.add(hop.after)
                if hop.zeros:
                    self.weights[stage] += self._even(stage).local_bytes(hop.after, dtype)
                self._pay(stage, *paid(hop, self.meshes[stage].devices[0], beside=beside))

    def _pay(self, stage: int, seconds: float, sent: float) -> None:
        self.comm_s[stage] += seconds
        self.sent[stage] += sent

    def _resharder(self, stage: int, other: int) -> EvenResharder:
        if (stage, other) not in self.between:
            there = away(self._even(other), beyond=self._even(stage).model)
            self.between[stage, other] = EvenResharder(
                self.cluster, even=self._even(stage), other=there
            )
        return self.between[stage, other]
