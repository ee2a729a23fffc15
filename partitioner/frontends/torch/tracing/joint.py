"""Traces the forward and backward passes of an exported program as one functional graph."""

from __future__ import annotations

import copy
import keyword
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from partitioner.frontends.torch.exporting import replaced
from partitioner.frontends.torch.patterns.rewrite import graph_modules
from partitioner.frontends.torch.tracing.repeated_layers import repeated_layers
from partitioner.frontends.torch.tracing.unrolled_trace import unrolled

aten = torch.ops.aten

#: Norms that write running statistics unless the sixth operand is false, unlike their schemas say.
_STATISTICS = frozenset({aten.batch_norm.default, aten.instance_norm.default})
#: Targets that are no operators, and write nothing themselves.
_HARMLESS = frozenset(
    {
        operator.getitem,
        torch.ops.higher_order.wrap_with_set_grad_enabled,
        torch.ops.higher_order.wrap_with_autocast,
    }
)

Table = Mapping[torch._ops.OpOverload, Callable[..., Any]]
#: A trace, and the tensors that are plain attributes of modules, by name.
Joint = tuple[fx.GraphModule, dict[str, torch.Tensor]]

#: Decompositions of losses that compare elements, whose parts may be cut.
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


#: Loggers that print tracebacks and guesses about failed traces, whose errors say the same.
_LOUD = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def plain_trace() -> Iterator[None]:
    """Traces without Python stacks of nodes, and without compiling each pass's graph to Python."""
    emitted = fx.config.do_not_emit_stack_traces
    fx.config.do_not_emit_stack_traces = True
    loggers = [logging.getLogger(name) for name in _LOUD if not logging.getLogger(name).disabled]
    for logger in loggers:
        logger.disabled = True
    try:
        targets = replaced({(fx.graph, "_format_target"): _target_code})
        with warnings.catch_warnings(), _use_lazy_graph_module(True), targets:
            warnings.simplefilter("ignore")
            yield
    finally:
        fx.config.do_not_emit_stack_traces = emitted
        for logger in loggers:
            logger.disabled = False


def _target_code(base: str, target: str) -> str:
    """The Python of an attribute by its path, whose names may be keywords: ``self.layers.in``."""
    for name in target.split("."):
        is_plain = name.isidentifier() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if is_plain else f"getattr({base}, {name!r})"
    return base


def joint_trace(program: ExportedProgram, table: Table, *, training: bool) -> Joint:
    """The trace of both passes, nothing in place; of proven repetitions, a few are traced."""
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    names = [  # of the tensors that user code reads and no module registers
        constants[node.name]
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in constants
        and not all(user.target is aten.lift_fresh_copy.default for user in node.users)
    ]
    with plain_trace():
        layers = repeated_layers(program)
        if layers is not None:
            few = copy.copy(program)
            few._graph_module = _make_graph_module(program.graph_module, layers.graph)
            few._graph_module.meta.update(program.graph_module.meta)
            with suppress(Exception):  # that of all layers raises it, with their numbers
                joint, attributes = _functional_trace(few, names, table, training=training)
                whole = unrolled(joint.graph, layers)
                if whole is not None:
                    return _make_graph_module(joint, whole), attributes
    return _functional_trace(program, names, table, training=training)


def _functional_trace(
    program: ExportedProgram, names: Sequence[str], table: Table, *, training: bool
) -> Joint:
    """The trace of a program, call by call.

    Functionalization takes a fifth of the time. So a program that writes nothing is traced without
    it, and again with it if its decompositions or its backward pass turn out to write.
    """
    if not _may_write(program.graph_module):
        # PyTorch asserts that nothing writes, but for copies into what is given.
        with suppress(AssertionError):
            joint = _trace(program, names, table, training=training, functional=True)
            if not _may_write(joint[0]):
                return joint
    return _trace(program, names, table, training=training, functional=False)


def _trace(
    program: ExportedProgram,
    names: Sequence[str],
    table: Table,
    *,
    training: bool,
    functional: bool,
) -> Joint:
    """The joint trace of a program that is known to be functional, or is made so."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    args, kwargs = program.example_inputs or ((), {})
    with ExitStack() as stack, plain_trace(), torch.set_grad_enabled(training):
        for part in graph_modules(program.graph_module):
            if part is not program.graph_module:  # which is compiled with its module
                part.recompile()
        flat = program.module(check_guards=False)
        for node in flat.graph.nodes:
            node.meta.pop("from_node", None)  # copied, history and all, for each call of the trace
        # The next trace takes no other tensors than parameters, buffers and inputs.
        attributes: dict[str, torch.Tensor] = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = flat.get_submodule(path)
            attributes[name] = getattr(owner, leaf)
            delattr(owner, leaf)
            owner.register_buffer(leaf, attributes[name], persistent=False)
        stack.enter_context(fx.traceback.preserve_node_meta())
        # An LSTM is traced as its parts: oneDNN's kernel needs a workspace whose size no trace
        # knows, and its backward pass ends the process if that was moved.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        joint = aot_export_joint_with_descriptors(
            stack,
            flat,
            args,
            kwargs,
            decompositions={**_LOSSES, **table},
            disable_functionalization=functional,
        )
    return joint.graph_module, attributes


def _may_write(module: fx.GraphModule) -> bool:
    """Test whether a call writes in place by its schema, or has no schema and may write."""
    nodes = (node for part in graph_modules(module) for node in part.graph.nodes)
    for node in (node for node in nodes if node.op == "call_function"):
        if isinstance(node.target, torch._ops.OpOverload):
            statistics = node.target in _STATISTICS and node.args[5] is not False
            writes = statistics or node.target._schema.is_mutable
        else:
            writes = node.target not in _HARMLESS
        if writes:
            return True
    return False
