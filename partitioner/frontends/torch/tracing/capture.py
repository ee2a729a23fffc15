"""Captures a module as one flat graph of ATen operators.

This and `joint` alone use PyTorch's tracing interfaces, some of them private (tried: 2.13).
"""

from __future__ import annotations

import copy
import inspect
import io
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from partitioner.backends.torch.graphs.signature import Signature
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.element_types import dtype_name
from partitioner.frontends.torch.exporting import named_tensors, replaced
from partitioner.frontends.torch.patterns.rewrite import graph_modules
from partitioner.frontends.torch.refusing.forward_effects import Assigned, refusing_effects
from partitioner.frontends.torch.refusing.reasons import depends_at, raised_at, reason
from partitioner.frontends.torch.tracing.assigned_buffers import (
    writing_assigned_buffers,
    written_early,
)
from partitioner.frontends.torch.tracing.backward_calls import keep_parameter_hooks, recording
from partitioner.frontends.torch.tracing.joint import Table, joint_trace, plain_trace


class Role(StrEnum):
    """The meaning of a placeholder or an output of a captured graph."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    GRADIENT = "gradient"
    UNUSED = "unused"


@dataclass(frozen=True)
class Slot:
    """A placeholder or output; `target` is the full name of a parameter or buffer, else ""."""

    role: Role
    target: str = ""


@dataclass(frozen=True)
class Autocast:
    """The state of `torch.autocast` on a type of device."""

    device: str = "cpu"  #: Type of device, such as "cpu".
    dtype: str = ""  #: Name of the element type that it casts to; "" if it is off.

    @classmethod
    def here(cls, module: nn.Module) -> Autocast:
        """The caller's state, for a module traced where its tensors are; else FrontendError."""
        weights = [*module.parameters(), *module.buffers()]
        device = next((t.device.type for t in weights if t.device.type != "meta"), "cpu")
        on = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
        if on and device not in on:
            raise FrontendError(
                f"torch.autocast({on[0]!r}) does nothing to a module that is traced on the "
                f"{device}: compile it under torch.autocast({device!r}), wherever it will run"
            )
        return cls(device, dtype_name(torch.get_autocast_dtype(device)) if on else "")

    def region(self) -> torch.autocast:
        """A region in this state."""
        if not self.dtype:
            return torch.autocast(self.device, enabled=False)
        return torch.autocast(self.device, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Captured:
    """The trace of a module."""

    #: Flat and functional: ATen calls with `meta["val"]`, no submodules but those of control flow.
    graph: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    #: A call with the example inputs, by their names in the export; without the graph's values.
    call: Signature
    tensors: Mapping[str, torch.Tensor]  #: Parameters and buffers by full name.
    ties: Mapping[str, str]  #: The first name of each parameter or buffer, by each of its names.
    #: Names of the parameters and buffers of the module's `state_dict`, whatever hooks make of it.
    persistent: frozenset[str]
    autocast: Autocast = Autocast()  #: The state around the trace; the graph has its casts.

    @cached_property
    def training(self) -> bool:
        """Tell whether there is a backward pass."""
        return any(slot.role is Role.TANGENT for slot in self.inputs)


#: Key of an exported graph's `meta`.
ASSIGNED = "assigned attributes"


def export_module(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool = False
) -> ExportedProgram:
    """Trace a module with `torch.export`.

    For training, its graph has calls of the module's own code for the backward pass, which
    `capture` traces: it is not to be saved. Its `meta[ASSIGNED]` are the attributes that the
    forward pass assigns, by the submodule's `id` and name. If it cannot be traced, a FrontendError
    has PyTorch's reason.
    """
    with plain_trace(), _stderr_without_graphs() as graphs:
        try:
            program, assigned = _settled(module, args, kwargs, training=training)
            if training:
                keep_parameter_hooks(module, program)
            program.graph_module.meta[ASSIGNED] = frozenset(assigned.names)
            return program
        except FrontendError as error:
            place = raised_at(error.__traceback__)
            raise _one_line(error, place) from error.__cause__
        except Exception as error:
            graphs.append(f"{getattr(error, 'partial_fx_graph', '')}\n")
            place = raised_at(error.__traceback__) or type(module).__name__
            raise FrontendError(
                f"{place}: torch.export cannot trace it: {reason(error)}"
            ) from error


def _settled(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> tuple[ExportedProgram, Assigned]:
    """Export as `_exported` does, and refuse numbers that change.

    They are those that each pass changes, or that change the next program.
    """
    program, assigned = _exported(module, args, kwargs, training=training)
    if numbers := assigned.lasting:
        with replaced({(one.module, one.name): one.after for one in numbers}):
            again, later = _exported(module, args, kwargs, training=training)
        if later.lasting or not _alike(program, again):
            raise numbers[0].error
        return again, later
    return program, assigned


def _exported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> tuple[ExportedProgram, Assigned]:
    """The program and what its forward pass assigns; a SyncBatchNorm is a batch norm here."""
    effects, backward = refusing_effects(module), recording(module, training=training)
    buffers = writing_assigned_buffers(module)
    one_process = replaced({(nn.SyncBatchNorm, "forward"): _BatchNorm.forward})
    with effects as assigned, backward as calls, buffers as assigned_buffers, one_process:
        program = torch.export.export(module, tuple(args), dict(kwargs), strict=False)
    calls.repeated_in(program.graph_module)
    written_early(program, assigned_buffers, training=training)
    return program, assigned


def calls_of(program: ExportedProgram) -> tuple[Any, ...]:
    """The calls of an exported module, with their arguments, and types and sizes of their results.

    They are those of the module's code. What a trace writes for them may depend on the batch: for
    one sample, a tensor is contiguous whatever the stride of the batch is.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape)
        return value if isinstance(value, int | float) else str(value)

    return tuple(
        (
            str(node.target),
            *map(plain, pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val")))),
        )
        for part in graph_modules(program.graph_module)
        for node in part.graph.nodes
    )


def _alike(program: ExportedProgram, other: ExportedProgram) -> bool:
    texts = [
        [str(part.graph) for part in graph_modules(one.graph_module)] for one in (program, other)
    ]
    pairs = zip(program.constants.values(), other.constants.values(), strict=False)
    return texts[0] == texts[1] and all(
        one is two or (torch.is_tensor(one) and torch.equal(one, two)) for one, two in pairs
    )


def _one_line(error: FrontendError, place: str = "") -> FrontendError:
    """An error of ours at a place, without what PyTorch adds to it: where it ran its graph."""
    return FrontendError((f"{place}: " if place else "") + str(error).partition("\n")[0])


@contextmanager
def _stderr_without_graphs() -> Iterator[list[str]]:
    """Prints on stderr all but the last graph that joins the list: PyTorch prints failed graphs."""
    stderr, graphs = io.StringIO(), [""]
    try:
        with redirect_stderr(stderr):
            yield graphs
    finally:
        text = stderr.getvalue()
        print(text.replace(graphs[-1], "") if graphs[-1] else text, end="", file=sys.stderr)


def materialised(module: nn.Module) -> nn.Module:
    """The module or, on the meta device (which drops backward passes), a copy on a fake CPU."""
    weights = [*module.parameters(), *module.buffers()]
    if not any(tensor.device.type == "meta" for tensor in weights):
        return module
    fakes: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for weight in weights:
            fake = torch.empty_strided(
                weight.shape, weight.stride(), dtype=weight.dtype, device="cpu"
            )
            if isinstance(weight, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=weight.requires_grad)
            fakes[id(weight)] = fake
    return copy.deepcopy(module, memo=fakes)


def capture(
    module: nn.Module, program: ExportedProgram, table: Table, *, training: bool
) -> Captured:
    """The flat graph of an exported module: its forward pass and, for training, its backward pass.

    For training, the first flat output is the loss. The program, which `export_module` traced, is
    changed in place.
    """
    autocast = Autocast.here(module)
    _check_regions(program, autocast)
    differentiable: tuple[bool, ...] = ()
    if training:
        _check_loss(program)
        differentiable = _differentiable_results(module, program)
        _detach_outputs(program)
        _separate_gradients(program)
    try:
        joint, attributes = joint_trace(program, table, training=training)
    except FrontendError as error:
        raise _one_line(error) from error.__cause__
    except Exception as error:
        passes = "forward and backward passes" if training else "forward pass"
        place = depends_at(module, program)
        said = f"{place}: " if place else ""
        raise FrontendError(f"{said}the {passes} cannot be traced: {reason(error)}") from error
    tensors = named_tensors(module)
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    ties = {name: first_names[id(tensor)] for name, tensor in tensors.items()}
    placeholders = joint.graph.find_nodes(op="placeholder")
    inputs = tuple(_input_slot(node.meta["desc"]) for node in placeholders)
    descriptions = joint.graph.output_node().meta["desc"]
    frozen = {name for name, tensor in tensors.items() if not tensor.requires_grad}
    outputs = tuple(_output_slot(desc, frozen, training=training) for desc in descriptions)
    if training and not any(slot.role is Role.TANGENT for slot in inputs):
        raise FrontendError("no parameter that requires a gradient gets one from the loss")
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None
    assert out_spec is not None
    specs = program.graph_signature.output_specs
    results = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    call = Signature(
        in_spec,
        out_spec,
        tuple(str(name) for name in program.graph_signature.user_inputs),
        tuple(pytree.tree_flatten(program.example_inputs)[0]),
        others=tuple(arg.value if isinstance(arg, ConstantArgument) else None for arg in results),
        autocast=autocast.dtype,
        differentiable=differentiable,
        parameters=_parameters(module, program),
        defaults={
            parameter.name: parameter.default
            for parameter in inspect.signature(module.forward).parameters.values()
            if parameter.default is not parameter.empty
        },
    )
    return Captured(
        joint,
        inputs,
        outputs,
        call,
        tensors | attributes,
        ties | {name: name for name in attributes},
        frozenset(
            f"{path}.{name}".lstrip(".")
            for path, part in module.named_modules(remove_duplicate=False)
            for name, tensor in {**part._parameters, **part._buffers}.items()
            if tensor is not None and name not in part._non_persistent_buffers_set
        ),
        autocast,
    )


def _parameters(module: nn.Module, program: ExportedProgram) -> tuple[str, ...]:
    """Names of a module's positional arguments; of an archive, those of its trace."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    if named and all(p.kind is kinds[0] for p in named):
        return tuple(p.name for p in named)
    signature = program.module_call_graph[0].signature
    names = signature.forward_arg_names if signature is not None else None
    assert program.call_spec.in_spec is not None
    return tuple(names or ())[: len(program.call_spec.in_spec.child(0).children())]


def _differentiable_results(module: nn.Module, program: ExportedProgram) -> tuple[bool, ...]:
    """Tell of each flat result if it is floating and depends on a trained parameter."""
    parameters = program.graph_signature.inputs_to_parameters
    without_grad = torch.ops.higher_order.wrap_with_set_grad_enabled
    reached: set[fx.Node] = set()
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder":
            name = parameters.get(node.name)
            depends = name is not None and module.get_parameter(name).requires_grad
        elif node.target is without_grad and not node.args[0]:
            depends = False
        else:
            detaches = node.target is torch.ops.aten.detach.default
            depends = not detaches and not reached.isdisjoint(node.all_input_nodes)
        if depends:
            reached.add(node)
    results = list(program.graph_module.graph.output_node().args[0])
    return tuple(
        isinstance(node, fx.Node)
        and node in reached
        and isinstance(val := node.meta.get("val"), torch.Tensor)
        and (val.is_floating_point() or val.is_complex())
        for node in results[len(results) - len(program.graph_signature.user_outputs) :]
    )


def _detach_outputs(program: ExportedProgram) -> None:
    graph = program.graph_module.graph
    last = graph.output_node()
    results = list(last.args[0])
    first = len(results) - len(program.graph_signature.user_outputs)
    for index in range(first, len(results)):
        node = results[index]
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if index > first:
            with graph.inserting_before(last):
                cut = graph.call_function(torch.ops.aten.detach.default, (node,))
            cut.meta.update(val=node.meta["val"])
            results[index] = node = cut
        spec = program.graph_signature.output_specs[index]
        spec.arg = type(spec.arg)(name=node.name)
    last.args = (tuple(results),)


def _check_regions(program: ExportedProgram, autocast: Autocast) -> None:
    """Refuse parts of regions and branches that PyTorch exports and the next trace loses."""
    for part in graph_modules(program.graph_module):
        inner = part is not program.graph_module
        for node in part.graph.nodes:
            if node.op == "get_attr" and inner and torch.is_tensor(getattr(part, node.target)):
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


def _separate_gradients(program: ExportedProgram) -> None:
    """Give each result of a `torch.cond` a gradient of its own, by multiplying it by one.

    A sum of two results gives both the same gradient, and PyTorch traces no `torch.cond` of two
    operands that share memory; its backward pass is one whose operands are these gradients.
    """
    calls = (
        node
        for part in graph_modules(program.graph_module)
        for node in part.graph.nodes
        if node.target is torch.ops.higher_order.cond and len(node.meta["val"]) > 1
    )
    for result in [user for call in calls for user in call.users]:
        value = result.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            continue
        with result.graph.inserting_after(result):
            product = result.graph.call_function(torch.ops.aten.mul.Scalar, (result, 1.0))
        product.meta = dict(result.meta)
        result.replace_all_uses_with(product)
        product.args = (result, 1.0)


def _check_loss(program: ExportedProgram) -> None:
    results: Any = program.graph_module.graph.output_node().args[0]
    count = len(program.graph_signature.user_outputs)
    first = results[-count] if count else None
    loss = first.meta.get("val") if isinstance(first, fx.Node) else None
    if not isinstance(loss, torch.Tensor):
        result = "no tensor"
    elif loss.numel() != 1 or not loss.is_floating_point():
        result = f"{dtype_name(loss.dtype)}{list(loss.shape)}"
    else:
        return
    raise FrontendError(
        f"training needs a module that returns its loss first: a floating scalar, not {result}"
    )


_INPUT_ROLES: Mapping[str, Role] = {
    "ParamAOTInput": Role.PARAMETER,
    "BufferAOTInput": Role.BUFFER,
    "PlainAOTInput": Role.INPUT,
    "TangentAOTInput": Role.TANGENT,
    "ForwardTokenAOTInput": Role.UNUSED,  # orders calls that have an effect
    "BackwardTokenAOTInput": Role.UNUSED,
}


def _input_slot(desc: object) -> Slot:
    name = type(desc).__name__
    if name == "ViewBaseAOTInput":  # the memory that several inputs of the trace are parts of
        target = getattr(getattr(desc, "base_of", None), "target", "")
        raise FrontendError(
            f"{target or 'an input'} lies in the memory of another tensor, and the module writes "
            "to one of them: clone() one, or make it in forward"
        )
    if name not in _INPUT_ROLES:
        raise FrontendError(f"an input of kind {name} ({desc}) is not supported")
    return Slot(_INPUT_ROLES[name], getattr(desc, "target", ""))


def _output_slot(desc: Any, frozen: Container[str], *, training: bool) -> Slot:
    name = type(desc).__name__
    if desc is None or name in ("ForwardTokenAOTOutput", "BackwardTokenAOTOutput"):
        return Slot(Role.UNUSED)
    if name == "PlainAOTOutput":
        return Slot(Role.OUTPUT)
    if name == "GradAOTOutput":
        target = getattr(desc.grad_of, "target", "")
        return Slot(Role.GRADIENT, target) if target else Slot(Role.UNUSED)
    if name == "InputMutationAOTOutput":
        target = getattr(desc.mutated_input, "target", "")
        if not target:
            raise FrontendError("the module writes into one of its inputs: return a new tensor")
        if training and target not in frozen:
            raise FrontendError(
                f"the module writes into its parameter {target}: in training optimizers do"
            )
        return Slot(Role.BUFFER, target)
    raise FrontendError(f"an output of kind {name} ({desc}) is not supported")
