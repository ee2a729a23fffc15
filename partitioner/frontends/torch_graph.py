"""A captured PyTorch graph as a graph of the IR.

Weights of a module that is not trained are constants. Values that are written from step to step
(running statistics) and, in training, all that a `state_dict` holds are `partitioner::state` nodes,
and what is written, gradients included, goes through `partitioner::update` nodes (see
`partitioner.ir.ops.aten.state`).

In training all nodes that the forward results need come first. A value that both passes read has
an alias at its first use in the backward pass (a stored value one in the forward pass too), so
that the plan may gather it for each pass anew, or keep what the first one gathered. Views of stored
values are made again in the backward pass from its own alias.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch_again import Again
from partitioner.frontends.torch_capture import Captured, Role
from partitioner.frontends.torch_nodes import dtype_name, encode_call
from partitioner.frontends.torch_passes import Passes, late_states, needed, reading
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.offers import chosen
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.aten.derived import RULE
from partitioner.ir.types import TensorType, numpy_dtype

#: Name of the graph input that steers random draws; it changes every step.
SEED = "seed"
#: Results are their first argument.
_SAME = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh_copy", "aten::lift"})
#: Checks and notes without results.
_DROPPED = frozenset({"aten::_assert_tensor_metadata", "aten::_assert_async.msg"})
#: Operators that become our own, which draw from a seed that all ranks share.
_SEEDED = frozenset({"aten::native_dropout", "aten::rand"})
#: Operators that draw random numbers in a way that ranks cannot share.
_RANDOM = frozenset(
    f"aten::{name}"
    for name in (
        *("rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "bernoulli.p", "multinomial", "normal_functional", "uniform", "exponential"),
    )
)


@dataclass(frozen=True)
class ModuleGraph:
    """The IR of a module, and what its values stand for.

    Attributes:
        graph: The graph. Outputs: results of the module, then gradients and written buffers.
        captured: What it was made from.
        results: Value of each flat result of the module; None for one that is no tensor.
        gradients: Value of the gradient of each trained parameter, by its first name.
        written: New value of each buffer that is written, by its first name.
        stored: Value of each stored parameter or buffer, by its first name.
        tangent: Graph input for the gradient of the loss; "" for inference.
        inputs: Graph input of each flat example input; "" for those that are no tensors.
        fixed: Value of each parameter or buffer that is a constant, by its first name.
        kept: In training, the graph in which all that the backward pass reads is kept.
        offer: In training, makes the graph that offers to compute it again.
    """

    graph: Graph
    captured: Captured
    results: tuple[str, ...]
    gradients: Mapping[str, str]
    written: Mapping[str, str]
    stored: Mapping[str, str]
    tangent: str
    inputs: tuple[str, ...]
    fixed: Mapping[str, str] = field(default_factory=dict)
    kept: Graph | None = None
    offer: Callable[[], Graph] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def offered(self) -> Graph:
        """The graph that offers to compute again what the backward pass reads (see `ir.offers`)."""
        return self.graph if self.offer is None else self.offer()

    def of(self, names: Container[str]) -> ModuleGraph:
        """With the graph that a plan of these nodes' names is for; as it is if there is none."""
        if self.kept is None or all(node.name in names for node in self.kept.nodes):
            return self
        try:
            return replace(self, graph=chosen(self.offered, names))
        except IRError:
            return self


def module_graph(
    captured: Captured, name: str, state_bytes: int = 0, keep: frozenset[str] = frozenset()
) -> ModuleGraph:
    """The graph of a captured module.

    Args:
        captured: The module.
        name: Of the graph.
        state_bytes: Bytes an element that an optimizer keeps of each trained parameter.
        keep: First names of what is stored even if the graph only reads it.

    Raises:
        FrontendError: An operator, a type or an argument has no form in the IR.
    """
    return _Builder(captured, name, state_bytes, keep).run()


@dataclass
class _Builder:
    captured: Captured
    name: str
    state_bytes: int
    keep: frozenset[str]
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)  # of fx nodes, by their names
    names: set[str] = field(default_factory=set)  # of nodes
    stored: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    draws: int = 0
    tangent: str = ""

    def run(self) -> ModuleGraph:
        captured = self.captured
        nodes = list(captured.graph.graph.nodes)
        fed = self._placeholders([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
        (last,) = (node for node in nodes if node.op == "output")
        flat = _flat_outputs(last)
        results, forward = [], []
        for slot, found in zip(captured.outputs, flat, strict=True):
            if slot.role is Role.OUTPUT:
                results.append(self.values[found.name] if found is not None else "")
        forward += [value for value in results if value]
        written = self._updates(flat, Role.BUFFER)
        gradients = self._updates(flat, Role.GRADIENT)
        if self.tangent and not gradients:
            raise FrontendError(f"{self.name}: no parameter that requires a gradient gets one")
        shown = self._shown(results)
        outputs = (*dict.fromkeys(v for v in shown if v), *gradients.values(), *written.values())
        first = (*(v for v in shown if v), *written.values())
        graph = self._graph(outputs, first)
        fixed = {name: value for name, value in self.fixed.items() if value in graph.constants}
        stored = {k: v for k, v in self.stored.items() if v in graph.types}
        offer = partial(self._graph, outputs, first, again=True)
        return ModuleGraph(
            graph,
            captured,
            tuple(shown),
            gradients,
            written,
            stored,
            self.tangent,
            fed,
            fixed,
            graph if self._training else None,
            offer if self._training else None,
        )

    # Values ----------------------------------------------------------------------------------

    def _placeholders(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        mutated = {s.target for s in self.captured.outputs if s.role is Role.BUFFER}
        fed = []
        names = iter(self.captured.names)
        for node, slot in zip(nodes, self.captured.inputs, strict=True):
            tensor = node.meta.get("val")
            if slot.role in (Role.PARAMETER, Role.BUFFER):
                self._held(node, slot.role, slot.target, slot.target in mutated)
            elif isinstance(tensor, torch.Tensor):
                value = "tangent" if slot.role is Role.TANGENT else next(names)
                self.inputs.append(self._value(node, value))
                if slot.role is Role.TANGENT:
                    self.tangent = self.inputs[-1]
                else:
                    fed.append(self.inputs[-1])
            else:
                next(names)
                fed.append("")
        return tuple(fed)

    def _held(self, node: fx.Node, role: Role, target: str, mutated: bool) -> None:
        """A parameter or buffer: stored if it is written or trained with, else a constant.

        Tied ones are one.
        """
        first = self.captured.ties.get(target, target)
        tensor = self.captured.tensors[first]
        trained = role is Role.PARAMETER and self._training and tensor.requires_grad
        kept = first in self.keep or (self._training and target in self.captured.persistent)
        if first in self.types:
            self.values[node.name] = first
            return
        value = self._value(node, first)
        if kept or mutated:
            attrs = {"state_bytes": self.state_bytes} if trained else {"state_bytes": 0}
            path = "/" + first.replace(".", "/")
            self._add(Node(self._free(path), "partitioner::state", (), (value,), attrs))
            self.stored[first] = value
        else:
            steers = role is Role.BUFFER and not (tensor.is_floating_point() or _is_fake(tensor))
            load = constant_loader(tensor, first)
            self.constants[value] = Constant(self.types[value], load, weight=not steers)
            self.fixed[first] = value

    @property
    def _training(self) -> bool:
        return any(slot.role is Role.TANGENT for slot in self.captured.inputs)

    def _constant(self, node: fx.Node) -> None:
        found = getattr(self.captured.graph, str(node.target), None)
        if isinstance(found, torch.Tensor):
            node.meta.setdefault("val", found)
            value = self._value(node, str(node.target))
            self.constants[value] = Constant(self.types[value], constant_loader(found, value))

    def _value(self, node: fx.Node, wish: str) -> str:
        """Declare the value of a node under a name that is free."""
        value = wish
        while value in self.types:
            value += "'"
        self.types[value] = _type(node.meta["val"], node.name)
        self.values[node.name] = value
        return value

    # Calls -----------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # its value was declared with the call it is of
        if not isinstance(node.target, torch._ops.OpOverload):
            raise FrontendError(f"{_path(node) or '/'}: {node.target} is not supported")
        op, inputs, attrs = encode_call(
            node.target,
            node.args,
            node.kwargs,
            lambda x: isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor),
            lambda x: self.values[x.name],
        )
        if op in _DROPPED:
            return
        if op in _SAME:
            self.values[node.name] = inputs[0]
            return
        if op in _RANDOM:
            raise FrontendError(f"{_path(node) or '/'}: random operator {op} is not supported")
        if op in _SEEDED:
            op, inputs, attrs = self._seeded(node, inputs, attrs)
        attrs = {**attrs, **_derived(node, op)}
        outputs = tuple(self._results(node))
        self._add(Node(self._free(_path(node) + "/" + _short(op)), op, inputs, outputs, attrs))

    def _seeded(
        self, node: fx.Node, inputs: tuple[str, ...], attrs: Mapping[str, Attr]
    ) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
        """Dropout (with an operand) and uniform numbers draw from a seed that all ranks share."""
        if SEED not in self.inputs:
            self.types[SEED] = TensorType.of("int64", ())
            self.inputs.append(SEED)
        self.draws += 1
        found: dict[str, Attr] = {"index": self.draws}
        if inputs:
            return "partitioner::dropout", (inputs[0], SEED), {"p": attrs["p"], **found}
        made = node.meta["val"]
        found |= {"size": tuple(made.shape), "dtype": dtype_name(made.dtype)}
        return "partitioner::uniform", (SEED,), found

    def _results(self, node: fx.Node) -> Iterator[str]:
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            yield self._value(node, node.name)
            return
        read: dict[object, list[fx.Node]] = {}
        for user in node.users:
            if user.target is operator.getitem and user.users:
                read.setdefault(user.args[1], []).append(user)
        for index in range(len(val)):
            users = read.get(index, [])
            value = self._value(users[0], users[0].name) if users else ""
            self.values.update({other.name: value for other in users})
            yield value

    def _add(self, node: Node) -> None:
        self.nodes.append(node)

    def _free(self, wish: str) -> str:
        """A node name: ``/path/op``, then ``/path/op_1``, ``/path/op_2``."""
        name, count = wish, 0
        while name in self.names:
            count += 1
            name = f"{wish}_{count}"
        self.names.add(name)
        return name

    # Outputs ---------------------------------------------------------------------------------

    def _updates(self, flat: list[fx.Node | None], role: Role) -> dict[str, str]:
        """Update nodes of gradients or buffers; a tied parameter has one gradient."""
        found: dict[str, str] = {}
        for slot, node in zip(self.captured.outputs, flat, strict=True):
            if slot.role is not role or node is None:
                continue
            first = self.captured.ties.get(slot.target, slot.target)
            if first not in self.stored:
                continue
            if first in found:
                raise FrontendError(f"{slot.target}: tied to {first}, and both have a gradient")
            stored = self.stored[first]
            word = "gradient" if role is Role.GRADIENT else "next"
            value = f"{first}.{word}"
            self.types[value] = self.types[stored]
            name = self._free("/" + first.replace(".", "/") + "/" + word)
            made = self.values[node.name]
            self._add(Node(name, "partitioner::update", (made, stored), (value,), {"role": word}))
            found[first] = value
        return found

    def _shown(self, results: list[str]) -> list[str]:
        """Results that are a graph's outputs: made by a node, each once."""
        made = {value for node in self.nodes for value in node.writes}
        shown: list[str] = []
        for value in results:
            if value and (value not in made or value in shown):
                new = f"{value}.result"
                while new in self.types:
                    new += "'"
                self.types[new] = self.types[value]
                name = self._free("/result")
                self._add(Node(name, "partitioner::alias", (value,), (new,)))
                value = new
            shown.append(value)
        return shown

    # Order -----------------------------------------------------------------------------------

    def _graph(
        self, outputs: tuple[str, ...], forward_results: tuple[str, ...], *, again: bool = False
    ) -> Graph:
        """The graph of the calls, which may be asked for several times."""
        return replace(self, types=dict(self.types), names=set(self.names))._ordered(
            outputs, forward_results, again=again
        )

    def _ordered(
        self, outputs: tuple[str, ...], forward_results: tuple[str, ...], *, again: bool
    ) -> Graph:
        nodes = needed(self.nodes, outputs)
        forward = needed(nodes, forward_results)
        first = {node.name for node in forward}
        backward = [node for node in nodes if node.name not in first]
        optional: frozenset[str] = frozenset()
        if self._training:
            given = self.types, self._free, forward, backward
            passes = Again(*given, frozenset(outputs)) if again else Passes(*given)
            backward, optional = passes.run()
            forward = list(late_states(self._pass_aliases(forward, backward)))
        else:
            forward = list(late_states([*forward, *backward]))
            backward = []
        ordered = [*forward, *backward]
        read = {value for node in ordered for value in node.reads}
        made = {value for node in ordered for value in node.writes}
        kept = [value for value in self.inputs if value in read or not self._training]
        constants = {k: v for k, v in self.constants.items() if k in read}
        known = {*kept, *constants, *made}
        return Graph(
            self.name,
            tuple(kept),
            outputs,
            tuple(ordered),
            {value: kind for value, kind in self.types.items() if value in known},
            constants,
            {"aten": 1},
            frozenset(node.name for node in backward),
            optional,
        )

    def _pass_aliases(self, forward: list[Node], backward: list[Node]) -> list[Node]:
        """Stored values that both passes read have an alias in the forward pass too."""
        later = {value for node in backward for value in node.reads}
        both = later.intersection(self.stored.values())
        names: dict[str, str] = {}
        found: list[Node] = []
        for node in forward:
            if node.op == "partitioner::update":
                found.append(node)
                continue
            for value in node.reads:
                if value in both and value not in names:
                    names[value] = f"{value}.forward"
                    self.types[names[value]] = self.types[value]
                    path = self._free("/" + value.replace(".", "/") + "/forward")
                    found.append(Node(path, "partitioner::alias", (value,), (names[value],)))
            found.append(reading(node, names))
        return found


def _derived(node: fx.Node, op: str) -> dict[str, Attr]:
    """The rule of a call whose operator has no row, if one is known elsewhere."""
    if op in ROWS:
        return {}
    from partitioner.frontends.torch_fallback import derived_rule

    assert isinstance(node.target, torch._ops.OpOverload)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    rule = derived_rule(node.target, args, kwargs, node.meta["val"])
    return {RULE: rule} if rule else {}


def _flat_outputs(last: fx.Node) -> list[fx.Node | None]:
    (found,) = last.args
    assert isinstance(found, list | tuple)
    return [item if isinstance(item, fx.Node) else None for item in found]


def _type(tensor: torch.Tensor, name: str) -> TensorType:
    if tensor.layout is not torch.strided:
        raise FrontendError(f"{name}: {tensor.layout} tensors are not supported")
    for size in tensor.shape:
        if not isinstance(size, int):
            raise FrontendError(f"{name}: size {size} of {list(tensor.shape)} is not known")
    return TensorType.of(dtype_name(tensor.dtype), tensor.shape)


def _path(node: fx.Node) -> str:
    """``/path/of/the/submodule``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return "/" + path.replace(".", "/") if path else ""


def _short(op: str) -> str:
    """``"aten::sum.dim_IntList" -> "sum"``."""
    return op.rpartition("::")[2].partition(".")[0]


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no contents."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def constant_loader(tensor: torch.Tensor, name: str) -> Callable[[], np.ndarray]:
    """Reads a tensor's contents when they are asked for."""

    def load() -> np.ndarray:
        held = tensor.detach()
        if _is_fake(held):
            raise FrontendError(f"{name} has no contents: the module's weights are fake")
        dense = held.cpu().contiguous()
        kind = numpy_dtype(dtype_name(dense.dtype))
        if dense.numel() == 0:
            return np.empty(tuple(dense.shape), kind)
        raw: np.ndarray = dense.reshape(-1).view(torch.uint8).numpy()
        return raw.view(kind).reshape(tuple(dense.shape))

    return load
