"""Plans: the device group of each node, and the cuts of its factors over the group's axes.

A plan is small, readable and complete: node order, groups, cuts. Layouts, reshards, local shapes
and memory follow from the graph's rules, so a plan cannot contradict itself. It is stored as
versioned JSON; see docs/reference/plan.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Literal, get_args

from partitioner.ir.checks import read, value_of
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import COPIES, DeviceMesh, copies_on
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.rule import Cut, Rule

PLAN_VERSION = 1
_NO_BLOCKS = Blocks()
Objective = Literal["throughput", "latency", "memory"]
Status = Literal["optimal", "feasible", "time_limit"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


class PlanError(IRError):
    """A plan that is malformed or does not fit its graph."""


@dataclass(frozen=True)
class NodePlan:
    """A node's decision: index of its group in `Plan.groups`, and its cut factors."""

    group: int
    cuts: Mapping[str, Cut] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """A plan that was run on this machine, so that the best could be chosen by measurement."""

    plan: str  #: In words, the kind of the plan and the space that it was found in.
    predicted_s: float  #: Seconds of a request or step by the cost model.
    measured_s: float  #: Median over the rounds.
    spread: float  #: Half the distance of the quartiles, as a share of the median.
    kept: bool  #: Whether it is the plan that was kept.


@dataclass(frozen=True)
class Certificate:
    """The search's proof about a plan, and the measurements by which it was chosen, if any."""

    objective: str  #: "throughput", "latency" (seconds) or "memory" (bytes).
    cost: float  #: The plan's value of the objective, as `evaluate` gives it.
    bound: float  #: No plan of the searched space costs less.
    #: "optimal" (proven within the gap asked for), "feasible" (not proven within it), or
    #: "time_limit" (stopped before it was).
    status: str
    strategy: str  #: `Plan.kind` of the plan.
    solver: str  #: Solver that found the plan / solver that proved the bound.
    space: str = ""  #: The searched space, in words.
    seed: int = 0  #: Of all random choices of the search.
    #: Parts of the graph that the search decided as one (repeated blocks), in words.
    folded: str = ""
    #: The plans that were run before this one was kept; empty if the cost model chose it. Cost,
    #: bound and gap are the model's in either case.
    trials: tuple[Trial, ...] = ()

    @property
    def gap(self) -> float:
        """(cost - bound) / cost; 0 for a cost of 0."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


@dataclass(frozen=True)
class Pipeline:
    """The schedule in which stages take the micro-batches of a step; the graph is of one."""

    #: Name of the schedule (see `ir.pipeline`), or the rows of its table, one a lane.
    schedule: str | tuple[str, ...]
    micro_batches: int


@dataclass(frozen=True)
class Plan:
    """A decision for a whole graph.

    Attributes:
        graph_digest: `Graph.digest` of its graph.
        cluster: The cluster's description (`Cluster.to_data`).
        groups: Device groups that nodes run on.
        nodes: Decision by node name, in the global order in which every device runs its share.
        certificate: None for a plan written by hand.
        pipeline: None for a plan that runs each batch as a whole.
        blocks: The parts of the model that run in blocks; the nodes are those of the graph of all
            blocks.
        stages: The stage of each group, from 0; if not given, all groups are of one.
    """

    graph_digest: str
    cluster: Mapping[str, Any]
    groups: tuple[DeviceMesh, ...]
    nodes: Mapping[str, NodePlan]
    certificate: Certificate | None = None
    pipeline: Pipeline | None = None
    blocks: Blocks = _NO_BLOCKS
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.stages):
            object.__setattr__(self, "stages", (0,) * len(self.groups))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text without the certificate: equal plans give equal rank files."""
        return hashlib.sha256(replace(self, certificate=None).to_json().encode()).hexdigest()

    @property
    def micro_batches(self) -> int | None:
        """Number of micro-batches of a step; None for a plan that runs each batch as a whole."""
        return None if self.pipeline is None else self.pipeline.micro_batches

    @property
    def stage_devices(self) -> Mapping[int, tuple[int, ...]]:
        """The devices of each stage, in the order of its largest group."""
        devices: dict[int, tuple[int, ...]] = {}
        pairs = zip(self.groups, self.stages, strict=True)
        for group, stage in sorted(pairs, key=lambda pair: (pair[1], -pair[0].size())):
            own = devices.get(stage, ())
            devices[stage] = (*own, *(device for device in group.devices if device not in own))
        return devices

    @property
    def kind(self) -> str:
        """The form of the plan, whatever space it was found in.

        "single": all on one device. "inter": whole nodes on several devices. "intra": one group
        of several devices. "hybrid": several groups, at least one of them of several devices.
        "pipeline": several stages that take micro-batches in turn. "copies": each of several groups
        has all of the model, and requests of its own.
        """
        if len(set(self.stages)) > 1:
            return "pipeline"
        used = [self.groups[index] for index in {node.group for node in self.nodes.values()}]
        if any(COPIES in group.names for group in used):
            return "copies"
        shared = [group for group in used if group.axes]
        devices = {device for group in used for device in group.devices}
        if not shared:
            return "single" if len(devices) <= 1 else "inter"
        return "intra" if len(shared) == 1 and devices == set(shared[0].devices) else "hybrid"

    def to_json(self) -> str:
        """Canonical text: the same plan gives the same bytes."""
        cert, pipeline = self.certificate, self.pipeline
        certificate: dict[str, Any] | None = None
        if cert is not None:
            trials = {"trials": [vars(trial) for trial in cert.trials]} if cert.trials else {}
            fields = {key: value for key, value in vars(cert).items() if key != "trials"}
            certificate = {**fields, **trials, "gap": cert.gap}
        data: dict[str, Any] = {
            "version": PLAN_VERSION,
            "graph_digest": self.graph_digest,
            "cluster": self.cluster,
            "certificate": certificate,
        }
        groups: list[dict[str, Any]] = [
            {"axes": dict(mesh.axes), "devices": list(mesh.devices)} for mesh in self.groups
        ]
        if pipeline is not None:
            rows = pipeline.schedule
            schedule = rows if isinstance(rows, str) else list(rows)
            data["pipeline"] = {"schedule": schedule, "micro_batches": pipeline.micro_batches}
            stages = zip(groups, self.stages, strict=True)
            groups = [{**group, "stage": stage} for group, stage in stages]
        if self.blocks:
            data["blocks"] = self.blocks.to_data()
        data["groups"] = groups
        lines = []
        for name, node in self.nodes.items():
            cuts = {factor: str(cut) for factor, cut in node.cuts.items()}
            entry = {"group": node.group, **({"cuts": cuts} if cuts else {})}
            lines.append(f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}")
        head = json.dumps(data, indent=1)[:-2]
        return head + ',\n "nodes": {\n' + ",\n".join(lines) + "\n }\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of `to_json`; PlanError if it is no JSON, of another version or malformed."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"plan is not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            version = data.get("version") if isinstance(data, dict) else None
            raise PlanError(f"plan version is {version!r}, this program reads {PLAN_VERSION}")
        try:
            groups = tuple(map(_mesh_of, data["groups"]))
            nodes = {
                name: NodePlan(
                    value_of("group", node["group"], int),
                    {factor: Cut.parse(cut) for factor, cut in node.get("cuts", {}).items()},
                )
                for name, node in data["nodes"].items()
            }
            cert = data.get("certificate")
            certificate = _certificate_of(cert) if cert is not None else None
            digest = value_of("graph_digest", data["graph_digest"], str)
            cluster = value_of("cluster", data["cluster"], dict)
            blocks = Blocks.from_data(data["blocks"]) if "blocks" in data else _NO_BLOCKS
            pipeline, stages = None, tuple[int, ...]()
            if data.get("pipeline") is not None:
                pipeline = read(Pipeline, data["pipeline"])
                stages = tuple(value_of("stage", group["stage"], int) for group in data["groups"])
            return cls(digest, cluster, groups, nodes, certificate, pipeline, blocks, stages)
        except KeyError as error:
            raise PlanError(f"plan is malformed: it has no {error}") from None
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise PlanError(f"plan is malformed: {type(error).__name__} {error}") from None


def _mesh_of(group: Mapping[str, Any]) -> DeviceMesh:
    axes = value_of("axes", group["axes"], dict[str, int])
    return DeviceMesh(tuple(axes.items()), value_of("devices", group["devices"], tuple[int, ...]))


def _certificate_of(data: Mapping[str, Any]) -> Certificate:
    for name, kind in (("objective", Objective), ("status", Status), ("gap", float)):
        value_of(name, data[name], kind)
    cert = read(Certificate, {key: value for key, value in data.items() if key != "gap"})
    if cert.bound > cert.cost:
        raise ValueError(f"bound {cert.bound!r} is above cost {cert.cost!r}")
    if not math.isclose(cert.gap, data["gap"], rel_tol=1e-9, abs_tol=1e-12):
        raise ValueError(f"gap {data['gap']!r} is not (cost - bound) / cost, which is {cert.gap!r}")
    return cert


@dataclass(frozen=True)
class PlacedNode:
    """A node with everything that its decision implies."""

    node: Node
    mesh: DeviceMesh  #: Its device group.
    rule: Rule | None  #: Its rule, None if the op is opaque.
    layouts: Mapping[str, DimLayout]  #: Layout of each cut factor.
    #: Placement that each operand must have, in `node.inputs` order, then each capture; None where
    #: absent.
    ins: tuple[Placement | None, ...]
    outs: tuple[Placement | None, ...]  #: Placement of each result; None where absent.
    stage: int = 0  #: Its stage, in a plan with a pipeline.

    @property
    def absent(self) -> bool:
        """Tell whether the choice is to leave an optional node out."""
        return not self.node.writes

    @property
    def cut_text(self) -> str:
        """The cut factors and their layouts: ``"n/tp"``; ``""`` if none is cut."""
        return " ".join(f"{name}/{layout}" for name, layout in self.layouts.items())

    @property
    def sent(self) -> tuple[str, ...]:
        """The axes along which devices send each other iterations inside of the node."""
        return () if self.rule is None else self.rule.dispatched(self.layouts)

    @property
    def loads(self) -> tuple[float, ...]:
        """Shares of the choices of each part of the owners, in order; () if unknown or not cut."""
        dispatch = None if self.rule is None else self.rule.dispatch
        owners = self.layouts.get(dispatch.owners) if dispatch is not None else None
        if dispatch is None or not dispatch.loads or owners is None:
            return ()
        loads = {
            self.mesh.linear(owners.axes, point): dispatch.load(
                owners.pieces(self.mesh, point), owners.size
            )
            for _, point in self.mesh.coords()
        }
        return tuple(loads[part] for part in range(len(loads)))

    def group(self, point: Mapping[str, int]) -> tuple[int, ...]:
        """The devices that exchange iterations with a mesh coordinate, ascending; or ()."""
        sent = self.sent
        if not sent:
            return ()
        fixed = {axis: at for axis, at in point.items() if axis not in sent}
        found = (d for d, other in self.mesh.coords() if fixed.items() <= other.items())
        return tuple(sorted(found))

    def inside(self, graph: Graph) -> PlacedNode:
        """The node as its devices compute it, after iterations were sent: see `Rule.inside`."""
        if not self.sent or self.rule is None:
            return self
        inside = self.rule.inside(self.layouts, self.mesh)
        return place(graph, self.node, self.mesh, inside, self.rule)

    def operands(self) -> tuple[tuple[str, Placement], ...]:
        """(value, required placement) of every operand and capture that is present."""
        return self._ends[0]

    def results(self) -> tuple[tuple[str, Placement], ...]:
        """(value, placement) of every result that is present."""
        return self._ends[1]

    @cached_property
    def _ends(self) -> tuple[tuple[tuple[str, Placement], ...], ...]:
        sides = (*self.node.inputs, *self.node.captures), self.node.outputs
        return tuple(
            tuple([(n, p) for n, p in zip(names, places, strict=True) if p is not None])
            for names, places in zip(sides, (self.ins, self.outs), strict=True)
        )


def place(
    graph: Graph, node: Node, mesh: DeviceMesh, layouts: Mapping[str, DimLayout], rule: Rule | None
) -> PlacedNode:
    """Everything that a decision implies for one node: its group and the layout of cut factors.

    Raises:
        LayoutError: The cut has no layout.
        PlanError: An opaque op is on a group of several devices, or cut.
    """
    if rule is None:
        if {*mesh.names} - {COPIES} or layouts:
            raise PlanError(
                f"{node.name!r} ({node.op}) has no rule and must be whole on one device"
            )
        operands = [_whole(graph, value, mesh) for value in (*node.inputs, *node.captures)]
        results = [_whole(graph, value, mesh) for value in node.outputs]
    else:
        ins, outs = rule.shardings(layouts, mesh)
        operands = [_at(mesh, s) if v else None for v, s in zip(node.inputs, ins, strict=True)]
        operands += [_whole(graph, value, mesh) for value in node.captures]
        results = [_at(mesh, s) if v else None for v, s in zip(node.outputs, outs, strict=True)]
    return PlacedNode(node, mesh, rule, dict(layouts), tuple(operands), tuple(results))


def devices_of(placed: Iterable[PlacedNode]) -> frozenset[int]:
    """Devices that run at least one node."""
    return frozenset().union(*{node.mesh.members for node in placed})


def resolve(graph: Graph, plan: Plan) -> tuple[PlacedNode, ...]:
    """Every node with its placements, in the plan's global order.

    Raises:
        PlanError: The plan is for another graph, misses or invents a node or factor, breaks the
            data order, cuts a dim that cannot be cut, leaves a device an empty part, or writes a
            stored value where it does not lie.
    """
    check_graph(graph, plan)
    missing = [node.name for node in graph.nodes if node.name not in plan.nodes]
    unknown = [name for name in plan.nodes if name not in graph.by_name]
    if missing or unknown:
        raise PlanError(f"plan misses nodes {missing[:3]} and has unknown nodes {unknown[:3]}")
    known = set(graph.inputs) | set(graph.constants)
    rules = rules_of(graph)
    placed: list[PlacedNode] = []
    homes: dict[str, Placement] = {}
    for name in plan.nodes:
        node = graph.by_name[name]
        late = [value for value in node.reads if value not in known]
        if late:
            raise PlanError(f"plan runs {name!r} before {late[0]!r} is made")
        known.update(node.writes)
        placed.append(resolve_node(graph, plan, node, rules[name]))
        homes.update(placed[-1].results())
        _check_written(placed[-1], homes)
    if plan.kind == "copies":
        _check_copies(graph, plan, placed)
    return tuple(placed)


def _check_written(placed: PlacedNode, homes: Mapping[str, Placement]) -> None:
    """Refuse a node that writes a stored value elsewhere than where it lies: its rank lacks it."""
    slot = row_of(placed.node).in_place
    if slot is None:
        return
    written = placed.node.inputs[slot]
    at, home = placed.ins[slot], homes.get(written)  # None of an input
    if home is not None and at != home:
        raise PlanError(
            f"{placed.node.name!r} writes {written!r} as {at}, which lies as {home}: give both "
            "nodes one group and the same cuts"
        )


def _check_copies(graph: Graph, plan: Plan, placed: Sequence[PlacedNode]) -> None:
    """Refuse copies that are not whole, share devices, train, or run in micro-batches."""
    copies = copies_on(node.mesh for node in placed)
    shared = [device for device, count in Counter(chain(*copies)).items() if count > 1]
    if graph.backward or plan.micro_batches:
        raise PlanError("whole copies serve whole requests: no training and no micro-batches")
    if shared:
        raise PlanError(f"device {shared[0]} is in several of the {len(copies)} whole copies")
    for node in placed:
        if dict(node.mesh.axes).get(COPIES) != len(copies):
            raise PlanError(
                f"{node.node.name!r} is on {node.mesh}, without a part in each of the "
                f"{len(copies)} whole copies"
            )
        if any(COPIES in layout.axes for layout in node.layouts.values()):
            raise PlanError(f"{node.node.name!r} is cut over {COPIES!r}, whose copies are whole")


def check_graph(graph: Graph, plan: Plan) -> None:
    """Refuse a plan for another graph."""
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"plan is for a graph with digest {plan.graph_digest[:12]}..., "
            f"this one has {graph.digest[:12]}..."
        )


def resolve_node(graph: Graph, plan: Plan, node: Node, rule: Rule | str) -> PlacedNode:
    """A node under its decision and rule (see `rule_of`); PlanError if they do not fit."""
    decision = plan.nodes[node.name]
    if not 0 <= decision.group < len(plan.groups):
        raise PlanError(
            f"{node.name!r} is on group {decision.group}; the plan has {len(plan.groups)}"
        )
    placed = place_cuts(graph, node, rule, plan.groups[decision.group], decision.cuts)
    stage = plan.stages[decision.group]
    return replace(placed, stage=stage) if stage else placed


def place_cuts(
    graph: Graph, node: Node, rule: Rule | str, mesh: DeviceMesh, cuts: Mapping[str, Cut]
) -> PlacedNode:
    """A node with its factors cut so; PlanError if they cannot be, or leave a device nothing."""
    factors = rule.factors if isinstance(rule, Rule) else {}
    for name in cuts:
        if name not in factors:
            raise PlanError(
                f"{node.name!r} ({node.op}) has no factor {name!r}; "
                f"it has {', '.join(factors) or 'none'}"
            )
    try:
        layouts = {n: _layout(cut, factors[n].size, mesh) for n, cut in cuts.items()}
        placed = place(graph, node, mesh, layouts, rule if isinstance(rule, Rule) else None)
        for value, at in (*placed.operands(), *placed.results()):
            for dim, layout in enumerate(at.sharding.dims):
                if layout.axes and _has_empty_part(layout):  # kernels take none; ORT divides by 0
                    sizes = layout.sizes()
                    shown = ",".join(map(str, sizes[:8])) + (",..." if len(sizes) > 8 else "")
                    raise PlanError(
                        f"dim {dim} of {value!r} ({layout.size}) is cut into parts of {shown} over "
                        f"{'*'.join(layout.axes)}; every part must have at least 1"
                    )
    except IRError as error:
        raise PlanError(f"{node.name!r} ({node.op}): {error}") from None
    return placed


@lru_cache(maxsize=65536)
def _layout(cut: Cut, size: int, mesh: DeviceMesh) -> DimLayout:
    return cut.layout(size, mesh)


@lru_cache(maxsize=65536)
def _has_empty_part(layout: DimLayout) -> bool:
    return layout.size > 0 and 0 in layout.sizes()


def _whole(graph: Graph, value: str, mesh: DeviceMesh) -> Placement | None:
    return _at(mesh, Sharding.replicate(graph.types[value].shape)) if value else None


@lru_cache(maxsize=65536)
def _at(mesh: DeviceMesh, sharding: Sharding) -> Placement:
    """Equal placements are mostly one object, which is quicker to compare."""
    return Placement(mesh, sharding)
