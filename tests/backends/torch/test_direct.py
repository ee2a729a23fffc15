"""Passes as ranks run them: what they call, and where they wait for the other ranks."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers operators
from partitioner.backends.torch.direct import Gate, direct, gated
from partitioner.backends.torch.eager import eager, gathered
from partitioner.backends.torch.operators.registry import KERNELS, LIBRARY

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def test_kernels_take_the_arguments_of_their_operators() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if "partitioner::" in name}
    assert {operator.name() for operator in KERNELS} == registered, LIBRARY
    for operator, kernel in KERNELS.items():
        arguments = operator._schema.arguments
        assert not any(one.has_default_value() or one.kwarg_only for one in arguments), operator
        signature(kernel).bind(*arguments)


def test_a_pass_calls_kernels_and_communications_directly() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = graph.call_function(torch.ops.partitioner.batch_norm_sums.default, (x,))
    whole = graph.call_function(c10d.all_gather_into_tensor.default, (sums, 2, "g"))
    arrived = graph.call_function(c10d.wait_tensor.default, (whole,))
    graph.output((arrived,))
    module = direct(eager(fx.GraphModule(torch.nn.Module(), graph)))
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called[0] is KERNELS[torch.ops.partitioner.batch_norm_sums.default]
    assert not any(isinstance(target, torch._ops.OpOverload) for target in called)
    assert gathered not in called
    keys = torch._C._dispatch_tls_local_exclude_set()
    assert not keys.has(torch._C.DispatchKey.AutogradCPU)


def add(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.add.Tensor, (x, 1))


def own(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.partitioner.batch_norm_sums.default, (x,))


def reduce(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(c10d.all_reduce.default, (x, "sum", "g"))


def write(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.copy_.default, (x, x))


@pytest.mark.parametrize(
    ("calls", "before"),
    [((add, own), 2), ((add, reduce, add), 1), ((own, write), 1), ((write,), 0), ((), 0)],
)
def test_a_pass_waits_before_others_may_notice_it(
    calls: Sequence[Callable[[fx.Graph, fx.Node], fx.Node]], before: int
) -> None:
    graph, gate = fx.Graph(), Gate()
    x = graph.placeholder("x")
    for call in calls:
        x = call(graph, x)
    graph.output((x,))
    module = gated(eager(fx.GraphModule(torch.nn.Module(), graph)), gate)
    called: list[Any] = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called.index(gate.enter) == before
    assert len(called) == len(calls) + 1


def test_a_gate_waits_once() -> None:
    entered: list[int] = []
    gate = Gate(lambda: entered.append(1))
    gate.enter()
    gate.enter()
    assert entered == [1]
