"""Calls of a traced graph as nodes of the IR, branches of `torch.cond` included."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.nodes import dtype_name, encode_call
from partitioner.frontends.torch.passes import needed
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.aten.branches import BRANCHES, COND
from partitioner.ir.ops.aten.derived import RULE
from partitioner.ir.types import TensorType, numpy_dtype

#: Results are their first argument.
_SAME = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh_copy", "aten::lift"})
#: Checks and notes without results.
_DROPPED = frozenset(
    {"aten::_assert_tensor_metadata", "aten::_assert_async.msg", "aten::_linalg_check_errors"}
)
#: Their mean and variance have the weight's type; PyTorch's trace (2.13) says that of the data.
_NORMS = frozenset({"aten::native_layer_norm", "aten::native_group_norm"})
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


@dataclass(kw_only=True)
class Calls:
    """Nodes and values of a traced graph, gathered call by call.

    Attributes:
        module: What is traced; it holds constants and branches.
        nodes: Made so far.
        types: Of all values.
        constants: Tensors that the graph module itself holds.
        values: Value of each fx node, by the fx node's name.
        names: Of all nodes.
    """

    module: fx.GraphModule
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def add_calls(self, nodes: Iterable[fx.Node]) -> None:
        """Add what a graph holds and calls.

        Raises:
            FrontendError: An operator, a type or an argument has no form in the IR.
        """
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)

    def _constant(self, node: fx.Node) -> None:
        """A tensor of the graph module itself; a branch is found by what reads it."""
        found = getattr(self.module, str(node.target), None)
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

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # its value was declared with the call it is of
        if node.target is torch.ops.higher_order.cond:
            self._cond(node)
            return
        if node.target is torch.ops.higher_order.with_effects:
            _check_effect(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise FrontendError(f"{_path(node) or '/'}: {node.target} is not supported")
        op, inputs, attrs = encode_call(
            node.target,
            node.args,
            node.kwargs,
            is_tensor,
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
        self._correct(op, inputs, outputs)
        self._add(Node(self._free(_path(node) + "/" + _short(op)), op, inputs, outputs, attrs))

    def _correct(self, op: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Types of results that PyTorch's trace says wrongly."""
        if op in _NORMS and inputs[1]:
            kind = self.types[inputs[1]].dtype
            for value in filter(None, outputs[1:]):
                self.types[value] = replace(self.types[value], dtype=kind)

    def _seeded(
        self, node: fx.Node, inputs: tuple[str, ...], attrs: Mapping[str, Attr]
    ) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
        """A random draw as a draw from a seed that all ranks share."""
        raise NotImplementedError

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

    # Branches --------------------------------------------------------------------------------

    def _cond(self, node: fx.Node) -> None:
        """`torch.cond`; operands and results that nothing reads are left out."""
        predicate, yes, no, operands = node.args
        where = _path(node) or "/"
        given = [predicate, *operands]  # type: ignore[misc]
        if not all(map(is_tensor, given)):
            raise FrontendError(f"{where}: torch.cond with operands that are no tensors")
        outputs = list(self._results(node))
        wanted = [index for index, value in enumerate(outputs) if value]
        graphs = [_Branch.of(self.module, body, where, wanted) for body in (yes, no)]
        read = {
            index
            for graph in graphs
            for index, value in enumerate(graph.inputs)
            if graph.consumers[value]
        }
        bodies = (
            replace(graph, inputs=tuple(graph.inputs[index] for index in sorted(read)))
            for graph in graphs
        )
        inputs = [self.values[one.name] for one in given]
        self._add(
            Node(
                self._free(_path(node) + "/cond"),
                COND,
                (inputs[0], *(inputs[1 + index] for index in sorted(read))),
                tuple(outputs[index] for index in wanted),
                dict(zip(BRANCHES, bodies, strict=True)),
            )
        )


@dataclass(kw_only=True)
class _Branch(Calls):
    """A branch of `torch.cond`."""

    where: str

    @classmethod
    def of(cls, owner: fx.GraphModule, body: Any, where: str, wanted: Sequence[int]) -> Graph:
        """Its graph: inputs are the operands, outputs the results that are wanted."""
        module = getattr(owner, str(body.target))
        assert isinstance(module, fx.GraphModule)
        return cls(module=module, where=where).graph(str(body.target), wanted)

    def graph(self, name: str, wanted: Sequence[int]) -> Graph:
        nodes = list(self.module.graph.nodes)
        inputs = tuple(self._value(node, node.name) for node in nodes if node.op == "placeholder")
        self.add_calls(nodes)
        results = flat_outputs(nodes[-1])
        outputs = tuple(self._output(results[index]) for index in wanted)
        kept = needed(self.nodes, outputs)
        read = {value for node in kept for value in node.reads}
        constants = {value: held for value, held in self.constants.items() if value in read}
        known = {*inputs, *constants, *(value for node in kept for value in node.writes)}
        types = {value: kind for value, kind in self.types.items() if value in known}
        return Graph(name, inputs, outputs, tuple(kept), types, constants, {"aten": 1})

    def _output(self, node: fx.Node | None) -> str:
        """A result under a name of its own: an output is made by a node, and listed once."""
        if node is None:
            raise FrontendError(f"{self.where}: a branch of torch.cond gives no tensor")
        source = self.values[node.name]
        value = self._value(node, f"{node.name}.result")
        self.values[node.name] = source
        self._add(Node(self._free(f"/{value}"), "partitioner::alias", (source,), (value,)))
        return value

    def _seeded(
        self, node: fx.Node, inputs: tuple[str, ...], attrs: Mapping[str, Attr]
    ) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
        del inputs, attrs
        raise FrontendError(
            f"{self.where}: random operator {node.target} in a branch of torch.cond is not "
            "supported: draw before it"
        )


def _check_effect(node: fx.Node) -> None:
    """Calls with an effect are left out if they check something, else refused."""
    op = node.args[1]
    assert isinstance(op, torch._ops.OpOverload)
    name = op.name()  # type: ignore[no-untyped-call]
    if name not in _DROPPED:
        raise FrontendError(f"{_path(node) or '/'}: {name} has an effect, which is not supported")


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a call stands for a tensor."""
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def flat_outputs(last: fx.Node) -> list[fx.Node | None]:
    """What a graph returns; None for what is no tensor."""
    (found,) = last.args
    assert isinstance(found, list | tuple)
    return [item if isinstance(item, fx.Node) else None for item in found]


def _derived(node: fx.Node, op: str) -> dict[str, Attr]:
    """The rule of a call whose operator has no row, if one is known elsewhere."""
    if op in ROWS:
        return {}
    from partitioner.frontends.torch.dtensor_rules import derived_rule

    assert isinstance(node.target, torch._ops.OpOverload)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    rule = derived_rule(node.target, args, kwargs, node.meta["val"])
    return {RULE: rule} if rule else {}


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


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no contents."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def constant_loader(tensor: torch.Tensor, name: str) -> Callable[[], np.ndarray]:
    """Reads a tensor's contents when they are asked for."""

    def load() -> np.ndarray:
        held = tensor.detach()
        if is_fake(held):
            raise FrontendError(f"{name} has no contents: the module's weights are fake")
        dense = held.cpu().contiguous()
        kind = numpy_dtype(dtype_name(dense.dtype))
        if dense.numel() == 0:
            return np.empty(tuple(dense.shape), kind)
        raw: np.ndarray = dense.reshape(-1).view(torch.uint8).numpy()
        return raw.view(kind).reshape(tuple(dense.shape))

    return load
