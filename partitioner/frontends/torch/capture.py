"""PyTorch modules in: a module and example inputs -> one flat functional graph of ATen operators.

This and `torch_joint` alone use PyTorch's tracing interfaces, some of them private (tried: 2.13).
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.torch.joint import Table, joint_trace, plain_trace
from partitioner.frontends.torch.nodes import dtype_name

aten = torch.ops.aten

_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


class Role(StrEnum):
    """What a placeholder or an output of a captured graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    GRADIENT = "gradient"
    UNUSED = "unused"


@dataclass(frozen=True)
class Slot:
    """One placeholder or output.

    Attributes:
        role: What it is.
        target: Full name of the parameter, buffer or constant; "" for the others.
    """

    role: Role
    target: str = ""


@dataclass(frozen=True)
class Autocast:
    """What `torch.autocast` does to computations on a device.

    Attributes:
        device: Kind of device, as "cpu".
        dtype: Element type that it casts to, by name; "" if it is off.
    """

    device: str = "cpu"
    dtype: str = ""

    @classmethod
    def here(cls, module: nn.Module) -> Autocast:
        """What surrounds the caller, for a module that is traced where its tensors are.

        Raises:
            FrontendError: It is on for another kind of device.
        """
        held = [*module.parameters(), *module.buffers()]
        device = next((t.device.type for t in held if t.device.type != "meta"), "cpu")
        on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if on and device not in on:
            raise FrontendError(
                f"torch.autocast({on[0]!r}) does nothing to a module that is traced on the "
                f"{device}: compile it under torch.autocast({device!r}), wherever it will run"
            )
        return cls(device, dtype_name(torch.get_autocast_dtype(device)) if on else "")

    def region(self) -> torch.autocast:
        """A region in which it is so."""
        if not self.dtype:
            return torch.autocast(self.device, enabled=False)
        return torch.autocast(self.device, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Captured:
    """A module as a graph.

    Attributes:
        graph: Flat and functional: ATen calls with `meta["val"]`, no submodules but those of
            control flow.
        inputs: What each placeholder is, in order.
        outputs: What each output is, in order.
        in_spec: Structure of the example inputs, (args, kwargs).
        out_spec: Structure of what the module returns.
        tensors: Parameters and buffers by full name.
        ties: First of the names of a parameter or buffer that has several, by each of them.
        persistent: Names of the parameters and buffers of the module's `state_dict`.
        names: Names of the inputs, in order.
        arguments: The example inputs, flat, in the order of the INPUT placeholders.
        others: Flat results that are no tensors; None in the place of tensors.
        autocast: What surrounded the trace; the graph has its casts.
    """

    graph: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    tensors: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]
    persistent: frozenset[str]
    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    others: tuple[Any, ...]
    autocast: Autocast = Autocast()


def export_module(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ExportedProgram:
    """Trace a module with `torch.export`.

    Raises:
        FrontendError: It cannot be traced; says PyTorch's reason.
    """
    with plain_trace(), _without_graphs() as graphs:
        try:
            return torch.export.export(module, tuple(args), dict(kwargs), strict=False)
        except Exception as error:
            graphs.append(f"{getattr(error, 'partial_fx_graph', '')}\n")
            name = type(module).__name__
            raise FrontendError(f"{name}: torch.export cannot trace it: {_short(error)}") from error


@contextmanager
def _without_graphs() -> Iterator[list[str]]:
    """Of what is said on stderr, all but the graphs given: PyTorch prints them when it gives up."""
    said, graphs = io.StringIO(), [""]
    try:
        with redirect_stderr(said):
            yield graphs
    finally:
        text = said.getvalue()
        print(text.replace(graphs[-1], "") if graphs[-1] else text, end="", file=sys.stderr)


def materialised(module: nn.Module) -> nn.Module:
    """The module itself or, if its weights are on the meta device, a copy with fake CPU weights.

    (Tracing on the meta device loses the backward pass without a word.)
    """
    held = [*module.parameters(), *module.buffers()]
    if not any(tensor.device.type == "meta" for tensor in held):
        return module
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for tensor in held:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            trains = tensor.requires_grad
            made[id(tensor)] = (
                nn.Parameter(fake, requires_grad=trains)
                if isinstance(tensor, nn.Parameter)
                else fake
            )
    return copy.deepcopy(module, memo=dict(made.items()))


def capture(
    module: nn.Module, program: ExportedProgram, table: Table, *, training: bool
) -> Captured:
    """The flat graph of an exported module: its forward pass and, for training, its backward pass.

    For training the first output, flattened, is the loss; gradients are of it alone.

    Args:
        module: The user's module.
        program: What `export_module` made of it.
        table: Decompositions to apply.
        training: Whether the backward pass is wanted.

    Raises:
        FrontendError: The module cannot be differentiated: its first output is not a scalar of a
            floating type, or PyTorch says why.
    """
    _check_regions(program, Autocast.here(module))
    if training:
        _check_loss(program)
        detach_outputs(program)
        part_gradients(program)
    try:
        joint, attributes = joint_trace(program, table, training=training)
    except Exception as error:
        what = "forward and backward passes" if training else "forward pass"
        raise FrontendError(f"the {what} cannot be traced: {_short(error)}") from error
    module_tensors, ties = _names(module)
    module_tensors |= attributes
    ties |= {name: name for name in attributes}
    nodes = joint.graph.nodes
    inputs = tuple(_input_slot(n.meta["desc"]) for n in nodes if n.op == "placeholder")
    (last,) = (node for node in nodes if node.op == "output")
    outputs = tuple(_output_slot(desc, training=training) for desc in last.meta["desc"])
    if training and not any(slot.role is Role.TANGENT for slot in inputs):
        raise FrontendError("no parameter that requires a gradient gets one from the loss")
    return Captured(
        joint,
        inputs,
        outputs,
        _spec(program.call_spec.in_spec),
        _spec(program.call_spec.out_spec),
        {name: module_tensors[name] for name in ties},
        ties,
        frozenset(module.state_dict(keep_vars=True)),
        tuple(str(name) for name in program.graph_signature.user_inputs),
        tuple(pytree.tree_flatten(program.example_inputs)[0]),
        _others(program),
        Autocast.here(module),
    )


def _others(program: ExportedProgram) -> tuple[Any, ...]:
    """Each flat result that is no tensor; None in the place of tensors."""
    specs = program.graph_signature.output_specs
    results = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    return tuple(one.value if isinstance(one, ConstantArgument) else None for one in results)


def detach_outputs(program: ExportedProgram) -> None:
    """Cut every output but the loss off from differentiation."""
    graph = program.graph_module.graph
    (last,) = (node for node in graph.nodes if node.op == "output")
    results = list(last.args[0])
    first = len(results) - len(program.graph_signature.user_outputs)
    for index in range(first, len(results)):
        node = results[index]
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if index > first:
            with graph.inserting_before(last):
                cut = graph.call_function(aten.detach.default, (node,))
            cut.meta.update(val=node.meta["val"])
            results[index] = node = cut
        spec = program.graph_signature.output_specs[index]
        spec.arg = type(spec.arg)(name=node.name)
    last.args = (tuple(results),)


def _check_regions(program: ExportedProgram, autocast: Autocast) -> None:
    """Refuse what PyTorch exports of regions and branches and what is lost in the next trace."""
    for name, part in program.graph_module.named_modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op == "get_attr" and name and torch.is_tensor(getattr(part, node.target)):
                raise FrontendError(
                    "a branch of torch.cond makes a tensor from Python numbers: make it a buffer"
                )
            if node.target is not torch.ops.higher_order.wrap_with_autocast:
                continue
            device, _, enabled, *_ = node.args
            if enabled and device != autocast.device:
                raise FrontendError(
                    f"torch.autocast({device!r}) does nothing to a module that is traced on the "
                    f"{autocast.device}: write torch.autocast(x.device.type) in the module"
                )


def part_gradients(program: ExportedProgram) -> None:
    """Give each result of a `torch.cond` a gradient of its own, by multiplying it by one.

    A sum of two results gives both the same gradient, and PyTorch traces no `torch.cond` of two
    operands that share memory; its backward pass is one whose operands are these gradients.
    """
    for part in program.graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.target is torch.ops.higher_order.cond and len(node.meta["val"]) > 1:
                _multiply_results(part.graph, node)


def _multiply_results(graph: fx.Graph, call: fx.Node) -> None:
    for item in list(call.users):
        value = item.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            continue
        with graph.inserting_after(item):
            one = graph.call_function(aten.mul.Scalar, (item, 1.0))
        one.meta = dict(item.meta)
        item.replace_all_uses_with(one)
        one.args = (item, 1.0)


def _check_loss(program: ExportedProgram) -> None:
    (last,) = (node for node in program.graph_module.graph.nodes if node.op == "output")
    count = len(program.graph_signature.user_outputs)
    found = last.args[0][-count] if count else None
    loss = found.meta.get("val") if isinstance(found, fx.Node) else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = (
            f"{dtype_name(loss.dtype)}{list(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else "no tensor"
        )
        raise FrontendError(
            f"training needs a module that returns its loss first: a floating scalar, not {what}"
        )


def _input_slot(desc: object) -> Slot:
    name = type(desc).__name__
    target = getattr(desc, "target", "")
    roles = {
        "ParamAOTInput": Role.PARAMETER,
        "BufferAOTInput": Role.BUFFER,
        "PlainAOTInput": Role.INPUT,
        "TangentAOTInput": Role.TANGENT,
        "ForwardTokenAOTInput": Role.UNUSED,  # orders calls that have an effect
        "BackwardTokenAOTInput": Role.UNUSED,
    }
    if name not in roles:
        raise FrontendError(f"an input of kind {name} ({desc}) is not supported")
    return Slot(roles[name], target)


def _output_slot(desc: object, *, training: bool) -> Slot:
    name = type(desc).__name__
    if desc is None or name in ("ForwardTokenAOTOutput", "BackwardTokenAOTOutput"):
        return Slot(Role.UNUSED)
    if name == "PlainAOTOutput":
        return Slot(Role.OUTPUT)
    if name == "GradAOTOutput":
        source = desc.grad_of  # type: ignore[attr-defined]
        target = getattr(source, "target", "")
        return Slot(Role.GRADIENT, target) if target else Slot(Role.UNUSED)
    if name == "InputMutationAOTOutput":
        target = getattr(desc.mutated_input, "target", "")  # type: ignore[attr-defined]
        if not target:
            raise FrontendError("the module writes into one of its inputs: return a new tensor")
        if training and type(desc.mutated_input).__name__ == "ParamAOTInput":  # type: ignore[attr-defined]
            raise FrontendError(
                f"the module writes into its parameter {target}: in training optimizers do"
            )
        return Slot(Role.BUFFER, target)
    raise FrontendError(f"an output of kind {name} ({desc}) is not supported")


def _names(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by each of their names, and the first name of each."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    held: dict[str, torch.Tensor] = {
        **tensors,
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    first: dict[int, str] = {}
    for name, tensor in held.items():
        first.setdefault(id(tensor), name)
    return held, {name: first[id(tensor)] for name, tensor in held.items()}


def _spec(spec: pytree.TreeSpec | None) -> pytree.TreeSpec:
    assert spec is not None
    return spec


def _short(error: BaseException) -> str:
    """The first line of PyTorch's message, or what that announces; the rest is advice."""
    if isinstance(error, _UNKNOWN):
        return f"sizes or values that {error.func} gives depend on data"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and lines[0].endswith(":"):
        lines = [f"{lines[1]} ({lines[2]})"]
    return one_line(lines[0])[:300] if lines else type(error).__name__
