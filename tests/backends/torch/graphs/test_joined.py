"""Gradients of layer norms that one kernel computes."""

import pytest
import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers operators
from partitioner.backends.torch.graphs.eager import eager, layer_norm_grads
from partitioner.backends.torch.graphs.notes import note_tasks, noted_tasks

operators = torch.ops.partitioner


def graph_of(order: str, *, shares: bool = True) -> fx.GraphModule:
    """Gradients of the data (d) and of weight and bias (w), in this order; s comes before `scale`.

    Unless it `shares`, both read other gradients.
    """
    graph = fx.Graph()
    grad, x, mean, rstd, given = (graph.placeholder(n) for n in ("grad", "x", "mean", "rstd", "s"))
    results = {}
    for step in order:
        if step == "s":
            results["s"] = graph.call_function(torch.ops.aten.mul.Tensor, (given, 2))
        elif step == "d":
            name, rest = "layer_norm_grad_input", results["s"]
        else:
            name, rest = "layer_norm_grad_weight", torch.float32
        if step != "s":
            of = grad if shares or step == "d" else x
            operator = getattr(operators, name).default
            results[step] = graph.call_function(operator, (of, x, [8], mean, rstd, rest))
            note_tasks([results[step]], [step])
    graph.output((results["d"], results["w"]))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["sdw", "swd", "wsd"])
def test_both_gradients_are_one_call(order: str, dtype: torch.dtype) -> None:
    """Where the scale comes too late, they stay two."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 5, 3, 8).to(dtype)
    weight = torch.rand(8)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [8], weight, weight, 1e-5)
    module = graph_of(order)
    joined = eager(module)
    calls = [node for node in joined.graph.nodes if node.target is layer_norm_grads]
    assert len(calls) == (order != "wsd")
    assert all(set(noted_tasks(node)) == {"d", "w"} for node in calls)
    arguments = grad, x, mean, rstd, weight
    torch.testing.assert_close(joined(*arguments), module(*arguments))


def test_gradients_of_other_operands_stay_apart() -> None:
    joined = eager(graph_of("sdw", shares=False))
    assert not any(node.target is layer_norm_grads for node in joined.graph.nodes)
