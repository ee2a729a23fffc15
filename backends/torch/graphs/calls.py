"""Nodes of the IR as calls of PyTorch operators: `frontends.torch.building.nodes` backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import from_numpy, torch_dtype
from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.ops.aten.branches import BRANCHES, COND
from partitioner.ir.ops.aten.state import ALIAS

#: A rank's part of a tensor may have other strides than the whole tensor in the trace.
RESHAPES = {"aten::view": "aten::reshape", "aten::_unsafe_view": "aten::reshape"}
#: PyTorch's operators whose kernels read operands as if they were contiguous, refuse others, or
#: give results that depend on strides (2.13): they get contiguous ones (see `test_strides.py`).
DENSE = frozenset(
    f"aten::{name}"
    for name in (
        *("_embedding_bag", "_embedding_bag_backward", "_embedding_bag_dense_backward"),
        *("_embedding_bag_forward_only", "_embedding_bag_per_sample_weights_backward"),
        *("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "_pdist_backward"),
        *("_pdist_forward", "adaptive_max_pool3d_backward"),
        *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
        *("median.dim", "nanmedian.dim", "native_group_norm", "nll_loss2d_backward"),
        *("_ctc_loss", "_ctc_loss_backward"),
        *("_weight_norm_interface", "_weight_norm_interface_backward"),
    )
)
#: These look at the offset in memory, or at strides of dims of size 1, which may be any in a
#: contiguous tensor: they get copies.
COPIED = frozenset(
    f"aten::{name}"
    for name in ("as_strided", "as_strided_copy", "as_strided_scatter", "view_as_complex")
)
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}

#: Names that every graph module has already.
_TAKEN = frozenset(dir(fx.GraphModule({}, fx.Graph())))


@cache
def overload(op: str) -> torch._ops.OpOverload:
    """The operator of a node's op: ``overload("aten::sum.dim_IntList")``."""
    import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators

    packet, _, overload_name = op.partition(".")
    space, _, name = packet.partition("::")
    try:
        operator = getattr(getattr(getattr(torch.ops, space), name), overload_name or "default")
    except AttributeError:
        raise BackendError(f"PyTorch {torch.__version__} has no operator {op}") from None
    assert isinstance(operator, torch._ops.OpOverload)
    return operator


def arguments(
    node: Node, tensor: Callable[[str], Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a node's call, of the `tensor` of each value by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    values = iter(node.inputs)
    used = 0  # the arguments behind have their defaults
    for argument in overload(node.op)._schema.arguments:
        if argument.name in ("layout", "pin_memory"):
            continue
        if argument.name == "device":
            kwargs["device"] = device
            continue
        value = _argument(str(argument.type), node.attrs.get(argument.name), values, tensor)
        default = argument.default_value if argument.has_default_value() else ()
        is_plain = value is None or isinstance(value, bool | int | float | str | list)
        is_default = is_plain and type(value) is type(default) and value == default
        if argument.kwarg_only:
            if value is not None and not is_default:
                kwargs[argument.name] = value
        else:
            args.append(value)
            if not is_default:
                used = len(args)
    return tuple(args[:used]), kwargs


def _argument(
    schema_type: str, attr: Attr | None, values: Iterator[str], tensor: Callable[[str], Any]
) -> Any:
    if "Tensor" in schema_type and "List" in schema_type:
        assert attr is None or isinstance(attr, int)
        return [tensor(name) if name else None for name in islice(values, attr or 0)]
    if schema_type in ("Tensor", "Optional[Tensor]"):
        name = next(values)
        return tensor(name) if name else attr
    if isinstance(attr, tuple):
        return list(attr)
    if isinstance(attr, str) and schema_type in ("int", "Optional[int]"):
        return getattr(torch, attr) if attr in _MEMORY_FORMATS else torch_dtype(attr)
    return attr


_MEMORY_FORMATS = frozenset(
    {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
)


def add_argument(graph: fx.Graph, name: str) -> fx.Node:
    """Add an argument to a graph, under a name that is unique in its code.

    PyTorch gives the node such a name, but the code calls the argument by its target: an attribute
    with that name would be read in its place.
    """
    node = graph.placeholder(name)
    node.target = node.name
    return node


def hold(root: torch.nn.Module, name: str, value: Tensor | fx.GraphModule) -> str:
    """Keep a buffer or a branch in a graph's root under a free name, which is returned."""
    while hasattr(root, name) or name in _TAKEN:
        name += "_"
    if isinstance(value, Tensor):
        root.register_buffer(name, value)
    else:
        root.add_module(name, value)
    return name


def add_call(
    graph: fx.Graph,
    root: torch.nn.Module,
    node: Node,
    tensor: Callable[[str], fx.Node],
    device: torch.device,
    name: str | None = None,
) -> dict[str, fx.Node]:
    """Add a node's call to a graph, whose `root` keeps branches; returns each result's node."""
    if node.op == COND:
        bodies = [
            graph.get_attr(hold(root, f"{which}_branch", branch_module(node.attrs[which], device)))
            for which in BRANCHES
        ]
        predicate, *operands = map(tensor, node.inputs)
        cond = torch.ops.higher_order.cond
        branched: tuple[Any, ...] = (predicate, *bodies, tuple(operands))
        return _items(graph, node, graph.create_node("call_function", cond, branched, {}, name))
    target = overload(RESHAPES.get(node.op, node.op))

    def operand(name: str) -> fx.Node:
        if node.op in COPIED:
            return graph.call_function(torch.ops.aten.clone.default, (tensor(name),), _CONTIGUOUS)
        return (
            graph.call_method("contiguous", (tensor(name),)) if node.op in DENSE else tensor(name)
        )

    args, kwargs = arguments(node, operand, device)
    call = graph.create_node("call_function", target, args, kwargs, name)
    returns = target._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return {node.outputs[0]: call}
    return _items(graph, node, call)


def _items(graph: fx.Graph, node: Node, call: fx.Node) -> dict[str, fx.Node]:
    return {
        name: graph.call_function(getitem, (call, index))
        for index, name in enumerate(node.outputs)
        if name
    }


def branch_module(branch: Attr, device: torch.device) -> fx.GraphModule:
    """A branch as a graph module: takes its inputs, returns a tuple of its outputs."""
    assert isinstance(branch, Graph)
    root, graph = torch.nn.Module(), fx.Graph()
    known = {value: add_argument(graph, value) for value in branch.inputs}
    for value, constant in branch.constants.items():
        tensor = from_numpy(constant.load(), constant.type.dtype).to(device)
        known[value] = graph.get_attr(hold(root, value, tensor))
    for node in branch.nodes:
        if node.op == ALIAS:
            known[node.outputs[0]] = known[node.inputs[0]]
        else:
            known.update(add_call(graph, root, node, known.__getitem__, device))
    graph.output(tuple(known[value] for value in branch.outputs))
    return fx.GraphModule(root, graph)


#: Arguments of operators that say where a result lies, not what it is.
_PLACE = frozenset({"device", "layout", "pin_memory"})
_TENSOR = "a tensor"  #: Stands for every tensor among the arguments of a call.


@dataclass(frozen=True)
class Call:
    """A call of an operator, which may be compared with nodes of the IR."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> Call | None:
        """The call of a node; None if it calls no operator."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        return cls(node.target, node.args, node.kwargs)

    @property
    def op(self) -> str:
        """Key of the operator in the op table."""
        name, of = self.target._schema.name, self.target._schema.overload_name
        return f"{name}.{of}" if of else name

    @property
    def operands(self) -> Iterator[fx.Node | None]:
        """List its tensors in the order of a node's inputs.

        One that is absent or a number is None.
        """
        for argument, value in self._given:
            if "Tensor" in argument and "List" in argument:
                yield from value or ()
            elif argument in ("Tensor", "Optional[Tensor]"):
                yield value if isinstance(value, fx.Node) else None

    @property
    def _given(self) -> Iterator[tuple[str, Any]]:
        for index, argument in enumerate(self.target._schema.arguments):
            if argument.name in _PLACE:
                continue
            default = argument.default_value if argument.has_default_value() else None
            named = self.kwargs.get(argument.name, default)
            yield str(argument.type), self.args[index] if index < len(self.args) else named

    @cached_property
    def settings(self) -> tuple[Any, ...]:
        """List its arguments, without telling tensors apart."""
        return tuple(_setting(value) for _, value in self._given)

    def setting(self, index: int) -> Any:
        """An argument by its place."""
        return self.settings[index]

    def named(self, name: str) -> Any:
        """An argument by its name."""
        given = (a.name for a in self.target._schema.arguments if a.name not in _PLACE)
        return self.settings[[*given].index(name)]

    def is_like(self, node: Node) -> bool:
        """Test whether a node of the IR is emitted as this call, apart from its tensors."""
        target = overload(RESHAPES.get(node.op, node.op))
        given = arguments(node, lambda _: _TENSOR, torch.device("cpu"))
        return target is self.target and Call(target, *given).settings == self.settings


def _setting(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _TENSOR
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    return repr(value) if isinstance(value, float) and value != value else value
