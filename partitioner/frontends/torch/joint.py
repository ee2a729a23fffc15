"""An exported program -> the trace of its forward and backward passes, as one functional graph."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module

aten = torch.ops.aten

#: They write running statistics unless the sixth operand is false; their schemas do not say so.
_STATISTICS = frozenset({aten.batch_norm.default, aten.instance_norm.default})
#: No operators, and known to write nothing themselves.
_HARMLESS = frozenset(
    {
        operator.getitem,
        torch.ops.higher_order.wrap_with_set_grad_enabled,
        torch.ops.higher_order.wrap_with_autocast,
    }
)

Table = Mapping[torch._ops.OpOverload, Callable[..., Any]]
#: A trace, and the tensors that are plain attributes.
Joint = tuple[fx.GraphModule, dict[str, torch.Tensor]]

#: Losses that compare elements, as the operators that they are made of, so that they may be cut.
_LOSSES: Mapping[Any, Callable[..., Any]] = get_decompositions(
    [
        *(aten.mse_loss, aten.mse_loss_backward),
        *(aten.smooth_l1_loss, aten.smooth_l1_loss_backward),
        *(aten.huber_loss, aten.huber_loss_backward),
        *(aten.soft_margin_loss, aten.soft_margin_loss_backward),
        *(aten.binary_cross_entropy, aten.binary_cross_entropy_backward),
        aten.binary_cross_entropy_with_logits,
    ]
)


@contextmanager
def plain_trace() -> Iterator[None]:
    """A trace without what only people and interpreters of its modules need.

    No node has the Python stack that made it, and no pass compiles the graph it gives to Python.
    """
    emitted = fx.config.do_not_emit_stack_traces
    fx.config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings(), _use_lazy_graph_module(True):
            warnings.simplefilter("ignore")
            yield
    finally:
        fx.config.do_not_emit_stack_traces = emitted


def joint_trace(program: ExportedProgram, table: Table, *, training: bool) -> Joint:
    """The trace of both passes, or of the forward pass, in which nothing is written in place.

    Making it so takes a fifth of the time. So a program that writes nothing is traced without,
    and again with it if its decompositions or its backward pass turn out to write.
    """
    if not _writes(program.graph_module):
        # PyTorch asserts that nothing writes, but for copies into what is given.
        with suppress(AssertionError):
            joint = _traced(program, table, training=training, functional=True)
            if not _writes(joint[0]):
                return joint
    return _traced(program, table, training=training, functional=False)


def _traced(program: ExportedProgram, table: Table, *, training: bool, functional: bool) -> Joint:
    """The joint trace; writes are taken out of it unless it is known to be functional."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    args, kwargs = program.example_inputs or ((), {})
    with ExitStack() as stack, plain_trace(), torch.set_grad_enabled(training):
        for part in _parts(program):
            part.recompile()  # the program's own graph is compiled with its module
        flat = program.module(check_guards=False)
        for node in flat.graph.nodes:
            node.meta.pop("from_node", None)  # copied, history and all, for each call of the trace
        attributes = _hold_attributes(flat, program)
        stack.enter_context(fx.traceback.preserve_node_meta())
        # An LSTM becomes the operators that it is made of: oneDNN's kernel needs a workspace whose
        # size no trace knows, and its backward pass ends the process if that was moved.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        found = aot_export_joint_with_descriptors(
            stack,
            flat,
            args,
            kwargs,
            decompositions={**_LOSSES, **table},
            disable_functionalization=functional,
        )
    return found.graph_module, attributes


def _parts(program: ExportedProgram) -> Iterator[fx.GraphModule]:
    """Branches, and regions of other modes."""
    for name, part in program.graph_module.named_modules():
        if name and isinstance(part, fx.GraphModule):
            yield part


def _writes(module: fx.GraphModule) -> bool:
    """Whether a graph may write in place: a call says so, or is one that cannot be asked."""
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = (node for part in parts for node in part.graph.nodes)
    return any(node.op == "call_function" and _may_write(node) for node in nodes)


def _may_write(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target not in _HARMLESS
    statistics = node.target in _STATISTICS and node.args[5] is not False
    return statistics or node.target._schema.is_mutable


def _hold_attributes(flat: nn.Module, program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Make buffers of the tensors that are plain attributes of the user's modules, by name.

    The next trace takes no other tensors than parameters, buffers and inputs.
    """
    found = {}
    for name in program.graph_signature.lifted_tensor_constants:
        path, _, leaf = name.rpartition(".")
        if leaf.startswith("lifted_tensor_"):  # made in a call
            continue
        owner = flat.get_submodule(path)
        found[name] = getattr(owner, leaf)
        delattr(owner, leaf)
        owner.register_buffer(leaf, found[name], persistent=False)
    return found
