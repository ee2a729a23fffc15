"""Constraints of a user on the search: a TOML file of pins, or a plan (whole, or in part).

    [[pin]]
    nodes = ["/layer1/*"]     # node names, * and ? match; or op = "Conv"
    device = 1                # or a group: devices = [0, 1]

    [[pin]]
    tensor = "fc.weight"
    dim = 0                   # cut on this dim; axis = "tp" names the mesh axis if there are two

    [[pin]]
    tensor = "logits"
    replicate = true          # axis = "tp": not cut over that axis

    [[pin]]
    tensor = "embed.weight"
    cut = true                # on any dim; axis = "dp" names the mesh axis

    [dims]                    # by name: "PATTERN.DIM" of tensors, nodes, modules or operators
    batch = "x.0, y.0"
    hidden = ["*.mlp.up.weight.0"]

    [layout]                  # the mesh axes that they are cut over; "" for none
    batch = "dp"
    hidden = "tp"

    [loads]                   # tokens that each expert of a layer gets, in any one unit
    "*.mlp.experts" = [510, 90, 120, 304]

A pin leaves only the strategies that honour it, and so does a layout of every operator that has a
loop which is the dim; the rest is solved. A plan pins each node that it
lists to the decision it has there. Loads bind nothing: plans are priced by them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from numbers import Real
from pathlib import Path
from typing import Any

from partitioner.files import read_text
from partitioner.ir.errors import PartitionerError, did_you_mean, hints_keywords
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Sharding
from partitioner.ir.loads import Loads
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.plan import PlacedNode, Plan, PlanError, check_graph, resolve_node

#: Forms of the values of a pin; all others are texts.
_FORMS = {
    "nodes": 'a list of names, like ["layer0.*"]',
    **dict.fromkeys(("device", "dim"), "a whole number"),
    "devices": "a list of different devices, like [0, 1]",
    **dict.fromkeys(("replicate", "cut"), "true"),
}
_TABLES = ("pin", "dims", "layout", "loads")
_KEYS = {"nodes", "op", "device", "devices", "tensor", "dim", "axis", "replicate", "cut"}


class ConstraintError(PartitionerError, ValueError):
    """A constraint file that is malformed, or that names a part that the model does not have.

    `position` is that of the node that is left without a strategy; -1 in other errors.
    """

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True)
class Pin:
    """A constraint: its nodes or its tensor, and the demand on them; unset fields demand nothing.

    `side` is "made" if it binds only the producer of the tensor, "read" if only its readers (not
    as in-place operands), "" for both.
    """

    text: str  #: For errors.
    nodes: tuple[str, ...] = ()  #: Patterns of node names.
    op: str = ""  #: Op of nodes.
    devices: tuple[int, ...] = ()  #: Devices that the nodes run on; () for any.
    tensor: str = ""
    dim: int | None = None  #: Dim that the tensor is cut on.
    axis: str = ""  #: Mesh axis of `dim`, `replicate` or `cut`; "" for any.
    replicate: bool = False  #: The tensor is not cut.
    cut: bool = False  #: The tensor is cut on some dim.
    side: str = ""


@dataclass(frozen=True)
class NamedDims:
    """Dims by name, and the mesh axes that they lie over.

    Attributes:
        dims: By name, its dims as "PATTERN.DIM"; the pattern is of tensors, nodes, modules or
            operators, and the dim may be negative.
        layout: By name, the mesh axes that the dim is cut over; none if it is not cut.
        source: The file, for errors.
    """

    dims: Mapping[str, tuple[str, ...]]
    layout: Mapping[str, tuple[str, ...]]
    source: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the layout."""
        return tuple(dict.fromkeys(axis for axes in self.layout.values() for axis in axes))

    @classmethod
    def of(cls, dims: Any, layout: Any, source: str) -> NamedDims:
        """Named dims of two tables, whose values are lists, or strings with commas.

        Raises:
            ConstraintError: A table or a value is malformed, or a name has no dims.
        """
        seeds = {
            name: _words(value, f"{source} dim {name}") for name, value in _table(dims, source)
        }
        axes = {
            name: _words(value, f"{source} layout {name}") for name, value in _table(layout, source)
        }
        for name, texts in seeds.items():
            for text in texts:
                if not re.fullmatch(r".+\.-?\d+", text, re.ASCII):
                    raise ConstraintError(
                        f"{source} dim {name}: {text!r} names no dim: end it with one, as in "
                        f"'{text}.0'"
                    )
            if not texts:
                raise ConstraintError(f"{source} dim {name}: it names no dim of a tensor")
        for name, named in axes.items():
            if name not in seeds:
                hint = did_you_mean(name, seeds)
                raise ConstraintError(f"{source} layout {name}: no dim has that name{hint}")
            if len(set(named)) < len(named):
                raise ConstraintError(f"{source} layout {name}: an axis is named twice")
        return cls(seeds, axes, source)


@dataclass(frozen=True)
class Along:
    """A demand on operators: those with a loop that is a named dim are cut along it.

    Attributes:
        text: For errors.
        name: The name of the dim.
        axes: The mesh axes; without any, the loop is not cut.
        factors: By node, the factors that stand for the dim.
        ends: Operators, for people, that read values with the dim and cannot be cut along it.
    """

    text: str
    name: str
    axes: tuple[str, ...]
    factors: Mapping[str, frozenset[str]]
    ends: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Say how many operators it binds, and the first of those at which the dim ends."""
        count = len(self.factors)
        bound = f"{count} operator{' is' if count == 1 else 's are'}"
        if not self.axes:
            return f"{self.text}: {bound} not cut along it"
        more = f" and {len(self.ends) - 3} more" if len(self.ends) > 3 else ""
        end = f"; it ends at {', '.join(self.ends[:3])}{more}" if self.ends else ""
        return f"{self.text}: {bound} cut along it{end}"

    def honoured(self, node: Node, placed: PlacedNode) -> bool:
        """Test whether a strategy of a node is as demanded."""
        layouts = (placed.layouts.get(name) for name in self.factors.get(node.name, ()))
        return all(
            set(self.axes) <= set(at.axes if at else ()) if self.axes else not (at and at.axes)
            for at in layouts
        )


@hints_keywords
@dataclass(frozen=True)
class Constraints:
    """Pins, the plan whose decisions (of all nodes or some) are kept, and nodes to be cut.

    `named` has named dims and the axes that they lie over; on a graph, `along` has the demands that
    `strategies.named_dims` makes of them.
    `loads` has, by pattern of weights, nodes or modules, a number for each expert of such layers;
    they are no constraint, and a trace gives them to its graph (`ir.loads`).
    `busy` has, by mesh axis, nodes that are cut over the axis if any of their strategies is: along
    the factors named or, if none of their strategies is or none are named, along any.
    `places` has, by node, an axis and a place along it: of a mesh with the axis, the node runs on
    the devices at that place alone.
    """

    pins: tuple[Pin, ...] = ()
    plan: Plan | None = None
    busy: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    named: NamedDims | None = None
    along: tuple[Along, ...] = ()
    loads: Loads = ()
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)

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
        entries = data.get("pin", [])
        unknown = sorted(set(data) - set(_TABLES))
        if unknown:
            raise ConstraintError(
                f"{where}: only [[pin]] tables, [dims], [layout] and [loads] are known, found "
                f"{unknown}{did_you_mean(unknown[0], _TABLES)}"
            )
        if not isinstance(entries, list):
            raise ConstraintError(f"{where}: pin = {entries!r}; write each pin as a [[pin]] table")
        named = None
        if "dims" in data or "layout" in data:
            named = NamedDims.of(data.get("dims", {}), data.get("layout", {}), short)
        numbered = enumerate(entries, 1)
        pins = tuple(_pin(entry, f"{short} pin {number}") for number, entry in numbered)
        return cls(pins, named=named, loads=_loads(data.get("loads", {}), short))

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
        entries: Mapping[Any, Any] = placement  # not checked
        for path, device in entries.items():
            if not isinstance(path, str) or not all(path.split(".")):
                raise ConstraintError(f"placement: {path!r} is not the path of a submodule")
            if not _are_devices(_group(device)):
                raise ConstraintError(
                    f"placement of {path!r}: {device!r} is not a device or a group of them"
                )
            parts = path.split(".")
            outer = entries.keys() & {".".join(parts[:size]) for size in range(1, len(parts))}
            if outer:
                raise ConstraintError(
                    f"placement: {path!r} is part of {min(outer)!r}, which is placed too"
                )
        return cls(
            tuple(
                Pin(
                    f"placement of {path!r}",
                    (f"/{escape(path.replace('.', '/'))}/*",),
                    devices=_group(at),
                )
                for path, at in placement.items()
            )
        )

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
            if not pin.tensor and not any(_names(pin, node) for node in graph.nodes):
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
    def names_devices(self) -> bool:
        """Tell whether anything is pinned to devices."""
        return any(pin.devices for pin in self.pins)

    def over(self, axes: Collection[str], *, every: bool) -> Constraints:
        """The constraints as far as they are on some axes of a mesh.

        Args:
            axes: The axes.
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

    def demands(self, graph: Graph) -> Mapping[str, Hashable]:
        """What is demanded of each node that constraints bind, equal where the demands are."""
        by_tensor: dict[str, list[Pin]] = defaultdict(list)
        for pin in self.pins:
            by_tensor[pin.tensor].append(pin)
        found: dict[str, list[Hashable]] = defaultdict(list)
        for node in graph.nodes:
            for index, value in enumerate((*node.inputs, *node.outputs)):
                found[node.name] += (
                    (index, pin.dim, pin.axis, pin.replicate, pin.cut)
                    for pin in by_tensor.get(value, ())
                    if _concerns(pin, node)
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
        groups = (pin.devices for pin in self.pins if pin.devices and _names(pin, node))
        return tuple(sorted(next(groups, ())))

    def stage_of(self, node: Node) -> tuple[int, ...]:
        """The stage that a plan in stages has a node in, as its number; () if it says none."""
        kept = self.plan
        if kept is None or kept.pipeline is None or node.name not in kept.nodes:
            return ()
        return (kept.pipeline.stages[kept.nodes[node.name].group],)

    def bound_nodes(self, graph: Graph) -> Mapping[str, Sequence[int]]:
        """Positions of the nodes that each constraint binds, by its text for people.

        The constraints of a kind of parallelism are one.
        """
        by_tensor: dict[str, list[Pin]] = defaultdict(list)
        for pin in self.pins:
            if pin.tensor:
                by_tensor[pin.tensor].append(pin)
        of_nodes = [pin for pin in self.pins if not pin.tensor]
        bound: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(graph.nodes):
            values = dict.fromkeys((*node.inputs, *node.outputs))
            texts = [pin.text for pin in of_nodes if _names(pin, node)]
            texts += [
                pin.text for v in values for pin in by_tensor.get(v, ()) if _concerns(pin, node)
            ]
            texts += [demand.text for demand in self.along if node.name in demand.factors]
            texts += [f"parallel {axis}" for axis in self.busy if node.name in self.busy[axis]]
            if node.name in self.places:
                texts.append(f"parallel {self.places[node.name][0]}")
            if self.plan is not None and node.name in self.plan.nodes:
                texts.append("the plan that is kept")
            for text in dict.fromkeys(map(_without_detail, texts)):
                bound[text].append(position)
        return bound

    def check_axes(self, axes: Sequence[str]) -> None:
        """Refuse pins on axes other than these, which the searched meshes have.

        Raises:
            ConstraintError: A pin names another axis.
        """
        for pin in self.pins:
            if pin.axis and pin.axis not in axes:
                known = f"the axes are {', '.join(axes)}" if axes else "no mesh has axes here"
                raise ConstraintError(f"{pin.text}: no axis {pin.axis!r}; {known}")

    def keep(self, node: Node, candidates: Sequence[PlacedNode]) -> tuple[PlacedNode, ...]:
        """The strategies of a node that honour every pin."""
        kept, values = tuple(candidates), {*node.inputs, *node.outputs}
        for pin in self.pins:
            if not pin.tensor or pin.tensor in values:
                kept = tuple(placed for placed in kept if _honours(pin, node, placed))
        for demand in self.along:
            kept = tuple(placed for placed in kept if demand.honoured(node, placed))
        for axis, nodes in self.busy.items():
            if node.name in nodes:
                along = tuple(p for p in kept if _uses(p, axis, nodes[node.name]))
                kept = along or tuple(p for p in kept if _uses(p, axis, p.layouts)) or kept
        return kept

    def blame(self, node: Node, candidates: Sequence[PlacedNode]) -> tuple[str, str]:
        """The first constraint that leaves a node no strategy, and why if it does so alone.

        One that does so beside another is named with that.
        """
        kept: Sequence[PlacedNode] = candidates
        for number, pin in enumerate(self.pins):
            kept = [placed for placed in kept if _honours(pin, node, placed)]
            if not kept:
                own = [placed for placed in candidates if _honours(pin, node, placed)]
                if not own:
                    return pin.text, _why_not(pin, candidates)
                beside = (
                    f" beside {other.text}"
                    for other in self.pins[:number]
                    if not any(_honours(other, node, placed) for placed in own)
                )
                return pin.text + next(beside, ""), ""
        for demand in self.along:
            kept = [placed for placed in kept if demand.honoured(node, placed)]
            if not kept:
                return demand.text, ""
        return "its constraints", ""


def _of_size(plan: Plan, size: int) -> Plan:
    """The decisions of a plan in its stages of so many devices, each as if on the first devices."""
    devices = plan.stage_devices
    number = {
        stage: {device: n for n, device in enumerate(own)}
        for stage, own in devices.items()
        if len(own) == size
    }
    assert plan.pipeline is not None
    stages = plan.pipeline.stages
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
    return replace(plan, groups=groups, nodes=nodes, pipeline=None, certificate=None)


def _check_plan(plan: Plan, graph: Graph, devices: int) -> None:
    check_graph(graph, plan)
    for name in plan.nodes:
        if name not in graph.by_name:
            raise PlanError(f"plan has an unknown node {name!r}")
        node = graph.by_name[name]
        mesh = resolve_node(graph, plan, node, rule_of(graph, node)).mesh
        if max(mesh.devices) >= devices:
            raise PlanError(
                f"plan has {name!r} on device {max(mesh.devices)}, not one of 0..{devices - 1}"
            )


def _pin(entry: Any, text: str) -> Pin:
    if not isinstance(entry, Mapping) or set(entry) - _KEYS:
        unknown = sorted(set(entry) - _KEYS) if isinstance(entry, Mapping) else entry
        hint = did_you_mean(unknown[0], _KEYS) if isinstance(unknown, list) else ""
        raise ConstraintError(
            f"{text}: unknown keys {unknown}; known are {', '.join(sorted(_KEYS))}{hint}"
        )
    checks: Mapping[str, Callable[[Any], bool]] = {
        "nodes": lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
        **dict.fromkeys(("device", "dim"), lambda v: type(v) is int),
        "devices": lambda v: isinstance(v, list) and _are_devices(tuple(v)),
        **dict.fromkeys(("replicate", "cut"), lambda v: v is True),
    }
    for key, value in entry.items():
        if not checks.get(key, lambda v: isinstance(v, str))(value):
            raise ConstraintError(f"{text}: {key} = {value!r} is not {_FORMS.get(key, 'a text')}")
    subject = [key for key in ("nodes", "op", "tensor") if key in entry]
    demand = [key for key in ("device", "devices", "dim", "replicate", "cut") if key in entry]
    is_place = demand in (["device"], ["devices"])
    mixed = (subject == ["tensor"]) == is_place
    stray = "axis" in entry and is_place
    if len(subject) != 1 or len(demand) != 1 or mixed or stray:
        raise ConstraintError(
            f"{text}: give nodes or op with device or devices, or tensor with dim, "
            f"replicate = true or cut = true (and axis); found {sorted(entry)}"
        )
    values = {key: value for key, value in entry.items() if key not in ("device", "devices")}
    group = _group(entry.get("devices", entry.get("device", ())))
    return Pin(text, **{**values, "nodes": tuple(entry.get("nodes", ())), "devices": group})


def _table(table: Any, source: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise ConstraintError(f"{source}: [dims] and [layout] are tables of names, not {table!r}")
    return table.items()


def _loads(table: Any, source: str) -> Loads:
    """Loads by pattern.

    Raises:
        ConstraintError: They are no lists of numbers, or there is none above 0.
    """
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise ConstraintError(f"{source}: [loads] is a table of names, not {table!r}")
    for name, numbers in table.items():
        are_numbers = isinstance(numbers, list | tuple) and all(map(_may_be_load, numbers))
        if not are_numbers or not any(numbers):
            raise ConstraintError(
                f"{source} loads {name!r}: {numbers!r} is not a list of numbers of at least 0, one "
                "for each expert and not all of them 0"
            )
    return tuple((name, tuple(map(float, numbers))) for name, numbers in table.items())


def _may_be_load(number: object) -> bool:
    """Test for a number of at least 0, of Python or NumPy, that a float can hold."""
    if isinstance(number, bool) or not isinstance(number, Real):
        return False
    try:
        return 0 <= float(number) < math.inf
    except OverflowError:
        return False


def _words(value: Any, where: str) -> tuple[str, ...]:
    """The strings of a list, or of a string with commas; none of ""."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConstraintError(f"{where}: {value!r} is not a string or a list of strings")
    return tuple(word.strip() for word in words if word.strip())


def _group(devices: Any) -> tuple[Any, ...]:
    """A device, or a sequence of them, as a tuple."""
    return tuple(devices) if isinstance(devices, list | tuple) else (devices,)


def _are_devices(group: tuple[Any, ...]) -> bool:
    are_whole = all(type(device) is int and device >= 0 for device in group)
    return are_whole and len(set(group)) == len(group) > 0


def _names(pin: Pin, node: Node) -> bool:
    return node.op == pin.op or any(fnmatchcase(node.name, pattern) for pattern in pin.nodes)


def _without_detail(text: str) -> str:
    """A text of a constraint; of one of a kind of parallelism the kind: "parallel tp"."""
    return text.partition(":")[0] if text.startswith("parallel ") else text


def _concerns(pin: Pin, node: Node) -> bool:
    """Test whether a pin of a tensor binds a node that makes or reads it."""
    if pin.side and (pin.tensor in node.outputs) != (pin.side == "made"):
        return False
    row = row_of(node)
    return pin.side != "read" or row is None or row.in_place is None


def _honours(pin: Pin, node: Node, placed: PlacedNode) -> bool:
    if pin.devices:
        return not _names(pin, node) or set(placed.mesh.devices) == set(pin.devices)
    if not _concerns(pin, node):
        return True
    sides = placed.results() if pin.tensor in node.outputs else placed.operands()
    return all(_fits(pin, at.sharding) for value, at in sides if value == pin.tensor)


def _why_not(pin: Pin, candidates: Sequence[PlacedNode]) -> str:
    """Why no strategy of a node honours a pin of a tensor that is to be cut; "" if none is."""
    if not (pin.cut or pin.dim is not None) or not any(placed.mesh.axes for placed in candidates):
        return ""
    along = "any dim" if pin.dim is None else f"dim {pin.dim}"
    over = f" over axis {pin.axis!r}" if pin.axis else ""
    return f"it cannot be cut along {along} of {pin.tensor!r}{over}"


def _uses(placed: PlacedNode, axis: str, factors: Container[str]) -> bool:
    """Test whether a node is cut over an axis along one of these factors."""
    return any(axis in at.axes for name, at in placed.layouts.items() if name in factors)


def _fits(pin: Pin, sharding: Sharding) -> bool:
    if pin.replicate:
        return pin.axis not in sharding.axes if pin.axis else sharding.is_replicated
    if pin.cut:
        cut = {axis for layout in sharding.dims for axis in layout.axes}
        return pin.axis in cut if pin.axis else bool(cut)
    if pin.dim is None:
        return True
    axes = sharding.dims[pin.dim].axes
    return pin.axis in axes if pin.axis else bool(axes)
