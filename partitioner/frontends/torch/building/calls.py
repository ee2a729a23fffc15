"""Builds nodes of the IR from the calls of a traced graph, branches of `torch.cond` included."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import fx

from partitioner.backends.tensors import to_numpy
from partitioner.backends.torch.state.initialise import without_contents
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.element_types import dtype_name
from partitioner.ir.graph import Attr, Constant, Graph
from partitioner.ir.ops.aten.branches import BRANCHES, COND
from partitioner.ir.ops.aten.state import ALIAS
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter

#: Operators that return their first argument.
_SAME = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh_copy", "aten::lift"})
#: Checks and notes without results.
_DROPPED = frozenset(
    {"aten::_assert_tensor_metadata", "aten::_assert_async.msg", "aten::_linalg_check_errors"}
)
#: Norms whose mean and variance have the weight's type; in PyTorch's trace (2.13) the data's.
_NORMS = frozenset({"aten::native_layer_norm", "aten::native_group_norm"})
#: Operators that become our own, which draw from a seed that all ranks share.
_SEEDED = frozenset({"aten::native_dropout", "aten::rand"})
#: Random, though PyTorch (2.13) has no tag for it.
_RANDOM = frozenset({"aten::normal_functional"})

OpCall = tuple[str, tuple[str, ...], dict[str, Attr]]  #: An op, its inputs, its attributes.


#: What calls are added to.
_EMPTY = Graph("", (), (), (), {}, {}, {"aten": 1})


@dataclass(kw_only=True)
class Calls(GraphWriter):
    """Gathers the nodes and values of a traced graph, here of a branch of a `torch.cond`."""

    source: Graph = _EMPTY
    mark: str = "_"
    module: fx.GraphModule  #: The traced graph; it holds constant tensors and branches.
    path: str = ""  #: Path of the submodule that calls the branch; "" for the whole module.
    #: Value of each fx node, by the fx node's name.
    values: dict[str, str] = field(default_factory=dict)
    #: Number in autograd's sequence of the node of each name: nodes of the backward pass have that
    #: of the forward nodes which they differentiate.
    sequence: dict[str, int] = field(default_factory=dict)

    def add_calls(self) -> None:
        """Add constant tensors and calls; FrontendError if one has no form in the IR."""
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                tensor = getattr(self.module, str(node.target), None)
                if isinstance(tensor, torch.Tensor):  # else it is a branch
                    node.meta.setdefault("val", tensor)
                    value = self.add_value(node, str(node.target))
                    load = constant_loader(tensor, value)
                    self.constants[value] = Constant(self.types[value], load)
            elif node.op == "call_function":
                self._add_call(node)

    def add_value(self, node: fx.Node, wish: str) -> str:
        """Declare the value of an fx node; returns its name, which may have a number."""
        value = self.values[node.name] = self.value(wish, _type(node.meta["val"], node.name))
        return value

    def seeded(self, node: fx.Node, inputs: tuple[str, ...], attrs: dict[str, Attr]) -> OpCall:
        """The draw from a shared seed that takes the place of a random call."""
        del inputs, attrs
        raise FrontendError(
            f"{self.path or '/'}: random operator {node.target} in a branch of torch.cond is not "
            "supported: draw before it"
        )

    def _add_call(self, node: fx.Node) -> None:
        path = _path(node)
        if node.target is operator.getitem:
            return  # its value was declared with the call whose result it takes
        if node.target is torch.ops.higher_order.cond:
            self._add_cond(node)
            return
        if node.target is torch.ops.higher_order.with_effects:
            name = node.args[1].name()  # type: ignore[union-attr, operator]
            if name not in _DROPPED:
                raise FrontendError(f"{path or '/'}: {name} has an effect, which is not supported")
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise FrontendError(f"{path or '/'}: {node.target} is not supported")
        self._add_op_call(node, path)

    def _add_op_call(self, node: fx.Node, path: str) -> None:
        assert isinstance(node.target, torch._ops.OpOverload)
        op, inputs, attrs = encode_call(
            node.target, node.args, node.kwargs, _is_tensor, lambda x: self.values[x.name]
        )
        if op in _DROPPED:
            return
        if op in _SAME:
            self.values[node.name] = inputs[0]
            return
        is_random = op in _RANDOM or torch.Tag.nondeterministic_seeded in node.target.tags
        if op in _SEEDED:
            op, inputs, attrs = self.seeded(node, inputs, attrs)
        elif is_random and attrs.get("dropout_p") != 0.0:  # attention without dropout draws nothing
            raise FrontendError(f"{path or '/'}: random operator {op} is not supported")
        outputs = tuple(self._add_results(node))
        if op in _NORMS and inputs[1]:
            dtype = self.types[inputs[1]].dtype
            for value in filter(None, outputs[1:]):
                self.types[value] = replace(self.types[value], dtype=dtype)
        short = op.rpartition("::")[2].partition(".")[0]  # "aten::sum.dim_IntList" -> "sum"
        self.add(f"{path}/{short}", op, inputs, made=outputs, attrs=attrs)
        number = node.meta.get("seq_nr")
        adds_gradients = node.meta.get("is_gradient_acc")  # which has any number
        is_backward = node.meta.get("partitioner_tag") == "is_backward"
        known = is_backward == bool(node.meta.get("autograd_backward")) and not adds_gradients
        if number is not None and known:
            self.sequence[self.nodes[-1].name] = number

    def _add_results(self, node: fx.Node) -> Iterator[str]:
        """Declare the results of a call; yields "" for those that nothing reads."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            yield self.add_value(node, node.name)
            return
        items: dict[object, list[fx.Node]] = {}
        for user in node.users:
            if user.target is operator.getitem and user.users:
                items.setdefault(user.args[1], []).append(user)
        for index in range(len(val)):
            users = items.get(index, [])
            value = self.add_value(users[0], users[0].name) if users else ""
            self.values.update({other.name: value for other in users})
            yield value

    def _add_cond(self, node: fx.Node) -> None:
        """Add a `torch.cond`, without the operands and results that nothing reads."""
        predicate, yes, no, operands = node.args
        path = _path(node)
        tensors = [predicate, *operands]  # type: ignore[misc]
        if not all(map(_is_tensor, tensors)):
            raise FrontendError(f"{path or '/'}: torch.cond with operands that are no tensors")
        outputs = list(self._add_results(node))
        wanted = [index for index, value in enumerate(outputs) if value]
        graphs = [_branch_graph(self.module, body, path, wanted) for body in (yes, no)]
        read = [
            index
            for index in range(len(operands))  # type: ignore[arg-type]
            if any(graph.consumers[graph.inputs[index]] for graph in graphs)
        ]
        bodies = (
            replace(graph, inputs=tuple(graph.inputs[index] for index in read)) for graph in graphs
        )
        values = [self.values[tensor.name] for tensor in tensors]
        inputs = (values[0], *(values[1 + index] for index in read))
        results = tuple(outputs[index] for index in wanted)
        branches = dict(zip(BRANCHES, bodies, strict=True))
        self.add(f"{path}/cond", COND, inputs, made=results, attrs=branches)


def _branch_graph(owner: fx.GraphModule, body: Any, path: str, wanted: Sequence[int]) -> Graph:
    name = str(body.target)
    module = getattr(owner, name)
    assert isinstance(module, fx.GraphModule)
    calls = Calls(module=module, path=path)
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = tuple(calls.add_value(node, node.name) for node in placeholders)
    calls.add_calls()
    results = flat_outputs(module.graph)
    outputs = []
    for result in (results[index] for index in wanted):
        if result is None:
            raise FrontendError(f"{path or '/'}: a branch of torch.cond gives no tensor")
        # An output of a graph is made by a node, and listed once.
        source = calls.values[result.name]
        output = calls.add_value(result, f"{result.name}.result")
        calls.values[result.name] = source
        calls.add(f"/{output}", ALIAS, (source,), made=(output,))
        outputs.append(output)
    return calls.graph(name=name, inputs=inputs, outputs=tuple(outputs))


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def flat_outputs(graph: fx.Graph) -> list[fx.Node | None]:
    """The nodes that a graph returns; None in the place of what is no tensor."""
    (results,) = graph.output_node().args
    assert isinstance(results, list | tuple)
    return [item if isinstance(item, fx.Node) else None for item in results]


def _type(tensor: torch.Tensor, name: str) -> TensorType:
    if tensor.layout is not torch.strided:
        raise FrontendError(f"{name}: {tensor.layout} tensors are not supported")
    for size in tensor.shape:
        if not isinstance(size, int):
            raise FrontendError(f"{name}: size {size} of {list(tensor.shape)} is not known")
    return TensorType.of(dtype_name(tensor.dtype), tensor.shape)


def _path(node: fx.Node) -> str:
    """``/path/of/the/submodule`` that makes a call; "" for the whole module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return "/" + path.replace(".", "/") if path else ""


def constant_loader(tensor: torch.Tensor, name: str) -> Callable[[], np.ndarray]:
    """A function that reads a tensor's contents, and raises a `FrontendError` if it is fake."""

    def load() -> np.ndarray:
        if without_contents(tensor):
            raise FrontendError(f"{name} has no contents: the module's weights are fake")
        return to_numpy(tensor, dtype_name(tensor.dtype))

    return load


#: Arguments about a tensor's memory.
_MEMORY = frozenset({"device", "layout", "pin_memory"})


def encode_call(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
    name_of: Callable[[Any], str],
) -> tuple[str, tuple[str, ...], dict[str, Attr]]:
    """The op, inputs and attributes of the node that encodes a call.

    A node's op is the overload's full name (``"aten::sum.dim_IntList"``). Its inputs are the tensor
    arguments in the schema's order: "" for one that is absent or a Python number, each element in
    turn for a list of tensors. Every other argument is an attribute of its name, with defaults
    filled in and without None; a list of tensors has its length as attribute, a number in the place
    of a tensor its value. Element types and memory formats are text ("float32", "channels_last").
    Device, layout and pinning are left out: the backend chooses them.
    `partitioner.backends.torch.graphs.calls` decodes nodes. `is_tensor` tells whether an argument
    stands for a tensor, and `name_of` gives its value then. An argument without a form in the IR is
    refused by a FrontendError.
    """
    inputs: list[str] = []
    attrs: dict[str, Attr] = {}
    full, arguments = _schema(op)
    for index, (name, declared, default) in enumerate(arguments):
        if name in _MEMORY:
            continue
        value = args[index] if index < len(args) else kwargs.get(name, default)
        if declared in ("List[Tensor]", "Optional[List[Tensor]]"):
            items = [] if value is None else list(value)
            inputs += [name_of(item) if item is not None else "" for item in items]
            attrs[name] = len(items)
            continue
        if declared == "Tensor":
            inputs.append(name_of(value) if is_tensor(value) else "")
        if value is not None and not (declared == "Tensor" and is_tensor(value)):
            attrs[name] = _attr(op, name, value)
    return full, tuple(inputs), attrs


@cache
def _schema(op: torch._ops.OpOverload) -> tuple[str, tuple[tuple[str, str, Any], ...]]:
    schema = op._schema
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return full, tuple(
        (
            argument.name,
            str(argument.type).replace("Optional[Tensor]", "Tensor"),
            argument.default_value if argument.has_default_value() else None,
        )
        for argument in schema.arguments
    )


def _attr(op: object, name: str, value: Any) -> Attr:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float) for v in value):
        return tuple(value)
    raise FrontendError(f"{op}: argument {name} = {value!r} is not supported")
