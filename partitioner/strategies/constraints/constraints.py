"""The constraints of a search: a user's pins, named dims and plan, and those of kinds."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from partitioner.foundations.files import read_text
from partitioner.ir.errors import did_you_mean, hints_keywords
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.loads import Loads
from partitioner.ir.ops import rule_of, rules_of
from partitioner.ir.plan import PlacedNode, Plan, PlanError, check_graph, place_cuts, resolve_node
from partitioner.ir.rule import Cut
from partitioner.strategies.constraints.values import (
    Along,
    ConstraintError,
    NamedDims,
    Pin,
    placements,
    tables,
)

#: By mesh axis and node, the factors that the node is cut along over the axis, see `Constraints`.
Busy = Mapping[str, Mapping[str, frozenset[str]]]


@hints_keywords
@dataclass(frozen=True)
class Constraints:
    """Pins, the plan whose decisions (of all nodes or some) are kept, and nodes to be cut.

    `named` has named dims and the axes that they lie over; on a graph, `along` has the demands that
    `strategies.named_dims` makes of them.
    `loads` has, by pattern of weights, nodes or modules, a number for each expert of such layers;
    they are no constraint, and a trace gives them to its graph (`ir.nodes.loads`).
    `busy` has, by mesh axis, nodes that are cut over the axis if any of their strategies is: along
    the factors named or, if none of their strategies is or none are named, along any.
    `places` has, by node, an axis and a place along it: of a mesh with the axis, the node runs on
    the devices at that place alone.
    `last` is the graph of the last micro-batch, if that is smaller: what is cut there, too, has no
    empty part.
    """

    pins: tuple[Pin, ...] = ()
    plan: Plan | None = None
    busy: Busy = field(default_factory=dict)
    named: NamedDims | None = None
    along: tuple[Along, ...] = ()
    loads: Loads = ()
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    last: Graph | None = None

    @property
    def bound(self) -> bool:
        """Tell whether there is any constraint."""
        return bool(self.pins or self.busy or self.named or self.places) or self.plan is not None

    def joined(self, other: Constraints) -> Constraints:
        """Join these with others that keep no plan and no nodes busy over the same axes."""
        pins, busy = (*self.pins, *other.pins), {**self.busy, **other.busy}
        return replace(self, pins=pins, busy=busy, places={**self.places, **other.places})

    @classmethod
    def read(cls, path: Path) -> Constraints:
        """Read a .toml file of pins or a .json plan.

        Raises:
            ConstraintError: Not readable, not TOML, or a pin with unknown or missing keys.
            PlanError: A malformed plan.
        """
        is_plan = path.suffix == ".json"
        try:
            text = read_text(path)
            data = {} if is_plan else tomllib.loads(text)
        except OSError as error:
            raise ConstraintError(f"constraints {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConstraintError(
                f"constraints {path}: no text; give named dims, pins and loads (TOML) or a plan "
                "(JSON)"
            ) from None
        except (ValueError, RecursionError) as error:  # no TOML, or nested too deep
            raise ConstraintError(f"constraints {path}: {error}") from None
        if is_plan:
            try:
                return cls(plan=Plan.from_json(text))
            except PlanError as error:
                raise PlanError(f"constraints {path}: {error}") from None
        return cls._of(data, f"constraints {path}", path.name)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Constraints:
        """The constraints that a mapping says, as a file does: "dims" and "layout", "pin", "loads".

        >>> Constraints.of({"dims": {"batch": "x.0"}, "layout": {"batch": "dp"}}).named.layout
        {'batch': ('dp',)}

        Raises:
            ConstraintError: A key is unknown, or a value is malformed.
        """
        return cls._of(data, "constraints", "constraints")

    @classmethod
    def _of(cls, data: Mapping[str, Any], where: str, short: str) -> Constraints:
        pins, named, loads = tables(data, where, short)
        return cls(pins, named=named, loads=loads)

    @classmethod
    def placed(cls, placement: Mapping[str, int | Sequence[int]]) -> Constraints:
        """Pin submodules of a PyTorch model to devices, or groups of them, as in a split by hand.

        >>> Constraints.placed({"embed": 0, "layers.0.attn": 1}).pins[1].nodes
        ('/layers/0/attn/*',)

        Paths are as in `named_modules()`. All operators of the submodule, forward and backward, run
        on its device; the rest is solved.

        Raises:
            ConstraintError: A path or a device is malformed, or a submodule is part of another one.
        """
        return cls(placements(placement))

    def check(self, graph: Graph, devices: int) -> None:
        """Refuse pins on parts that the model or the cluster does not have.

        Raises:
            ConstraintError: A node pattern matches nothing, a tensor or device does not exist.
            PlanError: The plan does not fit the graph or the devices.
        """
        for pin in self.pins:
            if pin.tensor and pin.tensor not in graph.types:
                near = did_you_mean(pin.tensor, graph.types)
                raise ConstraintError(f"{pin.text}: the model has no tensor {pin.tensor!r}{near}")
            if not pin.tensor and not any(pin.names(node) for node in graph.nodes):
                near = did_you_mean(pin.op, (node.op for node in graph.nodes))
                near = did_you_mean(pin.nodes[0], graph.by_name) if pin.nodes else near
                raise ConstraintError(
                    f"{pin.text}: no node matches {list(pin.nodes) or pin.op!r}{near}"
                )
            for device in pin.devices:
                if not 0 <= device < devices:
                    raise ConstraintError(
                        f"{pin.text}: device {device} is not one of 0..{devices - 1}"
                    )
            rank = graph.types[pin.tensor].rank if pin.tensor else 0
            if pin.dim is not None and not -rank <= pin.dim < rank:
                raise ConstraintError(
                    f"{pin.text}: dim {pin.dim} of {pin.tensor!r}, which has {rank} dims"
                )
        if self.plan is not None:
            _check_plan(self.plan, graph, devices)

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what each named dim binds, as notes for the summary."""
        return tuple(demand.note for demand in self.along)

    @property
    def kept_meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes of the plan that is kept; () if none is."""
        return self.plan.groups if self.plan is not None else ()

    @property
    def names_devices(self) -> bool:
        """Tell whether anything is pinned to devices."""
        return any(pin.devices for pin in self.pins)

    def over(self, axes: Collection[str], *, every: bool) -> Constraints:
        """The constraints as far as they are on some axes of a mesh.

        Args:
            every: Whether these are all that the mesh has. A cut over any axis waits for the last.
        """
        pins = (
            pin
            for pin in self.pins
            if (pin.axis in axes if pin.axis else every or pin.replicate) and not pin.devices
        )
        named = (
            (demand, tuple(axis for axis in demand.axes if axis in axes)) for demand in self.along
        )
        along = (replace(one, axes=own) for one, own in named if own or not one.axes)
        busy = {axis: nodes for axis, nodes in self.busy.items() if axis in axes}
        return replace(self, pins=tuple(pins), along=tuple(along), busy=busy)

    @cached_property
    def _by_tensor(self) -> Mapping[str, Sequence[Pin]]:
        by_tensor: dict[str, list[Pin]] = defaultdict(list)
        for pin in self.pins:
            if pin.tensor:
                by_tensor[pin.tensor].append(pin)
        return by_tensor

    @cached_property
    def _of_nodes(self) -> Sequence[Pin]:
        return [pin for pin in self.pins if not pin.tensor]

    def demands(self, graph: Graph) -> Mapping[str, Hashable]:
        """Give what is demanded of each node that constraints bind, equal where the demands are."""
        by_tensor, found = self._by_tensor, defaultdict[str, list[Hashable]](list)
        for node in graph.nodes:
            for index, value in enumerate((*node.inputs, *node.outputs)):
                found[node.name] += (
                    (index, pin.dim, pin.axis, pin.replicate, pin.cut)
                    for pin in by_tensor.get(value, ())
                    if pin.concerns(node)
                )
        for number, demand in enumerate(self.along):
            for name, factors in demand.factors.items():
                found[name].append((number, factors))
        for axis, nodes in self.busy.items():
            for name, factors in nodes.items():
                found[name].append((axis, factors))
        return {name: tuple(demands) for name, demands in found.items() if demands}

    @property
    def cutting_pin(self) -> Pin | None:
        """The first pin by which a tensor is cut."""
        return next((pin for pin in self.pins if pin.cut or pin.dim is not None), None)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of devices that nodes are pinned to, each once, ascending."""
        return tuple(sorted({tuple(sorted(pin.devices)) for pin in self.pins if pin.devices}))

    def inside_stages(self, size: int) -> Constraints:
        """The constraints on a stage of so many devices, which are then numbered from 0 on.

        There are no pins to devices, which the stages have honoured. Of a plan that is kept, the
        decisions of all nodes in stages of this size remain.
        """
        pins = tuple(pin for pin in self.pins if not pin.devices)
        return replace(self, pins=pins, plan=self.plan and _of_size(self.plan, size))

    def group_of(self, node: Node) -> tuple[int, ...]:
        """The devices that a node is pinned to, ascending; () if it is not."""
        groups = (pin.devices for pin in self.pins if pin.devices and pin.names(node))
        return tuple(sorted(next(groups, ())))

    def stage_of(self, node: Node) -> tuple[int, ...]:
        """The stage that a plan in stages has a node in, as its number; () if it says none."""
        kept = self.plan
        if kept is None or node.name not in kept.nodes:
            return ()
        return (kept.stages[kept.nodes[node.name].group],)

    def bound_nodes(self, graph: Graph) -> Mapping[str, Sequence[int]]:
        """Positions of the nodes that each constraint binds, by its text for people.

        The constraints of a kind of parallelism are one.
        """
        by_tensor, bound = self._by_tensor, defaultdict[str, list[int]](list)
        for position, node in enumerate(graph.nodes):
            values = dict.fromkeys((*node.inputs, *node.outputs))
            texts = [pin.text for pin in self._of_nodes if pin.names(node)]
            texts += [
                pin.text for v in values for pin in by_tensor.get(v, ()) if pin.concerns(node)
            ]
            texts += [demand.text for demand in self.along if node.name in demand.factors]
            texts += [f"parallel {axis}" for axis in self.busy if node.name in self.busy[axis]]
            if node.name in self.places:
                texts.append(f"parallel {self.places[node.name][0]}")
            if self.plan is not None and node.name in self.plan.nodes:
                texts.append("the plan that is kept")
            kinds = (t.partition(":")[0] if t.startswith("parallel ") else t for t in texts)
            for text in dict.fromkeys(kinds):
                bound[text].append(position)
        return bound

    def check_axes(self, axes: Sequence[str]) -> None:
        """Refuse, by a ConstraintError, pins on other axes than these of the searched meshes."""
        for pin in self.pins:
            if pin.axis and pin.axis not in axes:
                known = f"the axes are {', '.join(axes)}" if axes else "no mesh has axes here"
                raise ConstraintError(f"{pin.text}: no axis {pin.axis!r}; {known}")

    def keep(
        self, node: Node, candidates: Sequence[PlacedNode], where: str, position: int = -1
    ) -> tuple[PlacedNode, ...]:
        """The strategies of a node that honour every pin.

        Args:
            where: The words in which a refusal names the space, such as "on dp=2".
            position: That of the node, for a refusal.

        Raises:
            ConstraintError: None of them does.
        """
        kept, values = tuple(candidates), dict.fromkeys((*node.inputs, *node.outputs))
        of_tensors = (pin for value in values for pin in self._by_tensor.get(value, ()))
        if self.last is not None:
            kept = tuple(placed for placed in kept if _has_parts(placed, self.last))
        for pin in (*self._of_nodes, *of_tensors):
            kept = tuple(placed for placed in kept if pin.honoured(node, placed))
        for demand in self.along:
            kept = tuple(placed for placed in kept if demand.honoured(node, placed))
        for axis, nodes in self.busy.items():
            if node.name in nodes:
                cut = tuple(p for p in kept if _uses(p, axis, nodes[node.name]))
                kept = cut or tuple(p for p in kept if _uses(p, axis, p.layouts)) or kept
        if not kept:
            blamed, why = self._blame(node, candidates)
            text = f"{blamed} leaves no strategy for {node.name!r} ({node.op}) {where}"
            raise ConstraintError(f"{text}: {why}" if why else text, position)
        return kept

    def _blame(self, node: Node, candidates: Sequence[PlacedNode]) -> tuple[str, str]:
        """Find the first constraint that leaves a node no strategy, and why: beside which other."""
        kept: Sequence[PlacedNode] = candidates
        for number, pin in enumerate(self.pins):
            kept = [placed for placed in kept if pin.honoured(node, placed)]
            if not kept:
                own = [placed for placed in candidates if pin.honoured(node, placed)]
                if not own:
                    return pin.text, pin.why_not(candidates)
                beside = (
                    f"none honours {other.text} too"
                    for other in self.pins[:number]
                    if not any(other.honoured(node, placed) for placed in own)
                )
                return pin.text, next(beside, "")
        for demand in self.along:
            kept = [placed for placed in kept if demand.honoured(node, placed)]
            if not kept:
                return demand.text, ""
        return "its constraints", ""


def _has_parts(placed: PlacedNode, graph: Graph) -> bool:
    """Test whether a strategy leaves no device an empty part in a graph of the same nodes.

    Parts of explicit sizes, which have others there, are taken for granted.
    """
    node = graph.by_name.get(placed.node.name)
    cuts = {name: Cut.of(layout, placed.mesh) for name, layout in placed.layouts.items()}
    if node is None or not cuts or any(cut.segments is not None for cut in cuts.values()):
        return True
    try:
        place_cuts(graph, node, rules_of(graph)[node.name], placed.mesh, cuts)
    except PlanError:
        return False
    return True


def _uses(placed: PlacedNode, axis: str, factors: Container[str]) -> bool:
    return any(axis in at.axes for name, at in placed.layouts.items() if name in factors)


def _of_size(plan: Plan, size: int) -> Plan:
    """The decisions of a plan in its stages of so many devices, each as if on the first devices."""
    devices = plan.stage_devices
    number = {
        stage: {device: n for n, device in enumerate(own)}
        for stage, own in devices.items()
        if len(own) == size
    }
    stages = plan.stages
    kept = [group for group, stage in enumerate(stages) if stage in number]
    groups = tuple(
        DeviceMesh(
            plan.groups[group].axes,
            tuple(number[stages[group]][device] for device in plan.groups[group].devices),
        )
        for group in kept
    )
    nodes = {
        name: replace(node, group=kept.index(node.group))
        for name, node in plan.nodes.items()
        if node.group in kept
    }
    return replace(plan, groups=groups, nodes=nodes, pipeline=None, stages=(), certificate=None)


def _check_plan(plan: Plan, graph: Graph, devices: int) -> None:
    check_graph(graph, plan)
    for name in plan.nodes:
        if name not in graph.by_name:
            raise PlanError(f"plan has an unknown node {name!r}")
        node = graph.by_name[name]
        used = max(resolve_node(graph, plan, node, rule_of(graph, node)).mesh.devices)
        if used >= devices:
            raise PlanError(f"plan has {name!r} on device {used}, not one of 0..{devices - 1}")
