"""Forms of operators whose operands are views."""

import torch
from torch import Tensor, nn

from partitioner.cost_model.prices.compute import shape_at
from partitioner.cost_model.profiles.forms import chain, form_of, memory_order
from partitioner.frontends.model import open_model
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.strategies.derive import Rules


class Turned(nn.Module):
    """Dims in other orders, by one view and by two, undone, and behind a view that does more."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = x.permute(2, 0, 1)
        twice = turned.transpose(1, 2)
        back = turned.permute(1, 2, 0)
        part = turned[1:]
        made = turned + 1
        return tuple(value.tanh() for value in (turned, twice, back, part, made))


def graph_of(module: nn.Module, *inputs: Tensor) -> Graph:
    return open_model(module, inputs).graph


def test_views_give_the_order_of_dims_in_memory() -> None:
    graph = graph_of(Turned(), torch.ones(2, 3, 4))
    read = [node.inputs[0] for node in graph.nodes if node.op == "aten::tanh"]
    x = torch.ones(2, 3, 4)
    orders = [memory_order(graph, value) for value in read]
    assert orders == [(1, 2, 0), (2, 1, 0), None, None, None]
    assert x.permute(2, 0, 1).permute(orders[0] or ()).is_contiguous()
    assert x.permute(2, 0, 1).transpose(1, 2).permute(orders[1] or ()).is_contiguous()


def test_a_product_with_a_transposed_weight_is_a_form_of_its_own() -> None:
    graph = graph_of(nn.Linear(6, 4, bias=False), torch.ones(3, 6))
    (node,) = (node for node in graph.nodes if node.op == "aten::mm")
    single = DeviceMesh.single(0)
    placed = place(graph, node, single, {}, Rules.of(graph).rule(node))
    form = form_of(graph, placed, lambda at: shape_at({}, at))
    assert form.operands == (("float32", (3, 6)), ("float32", (6, 4), (1, 0)))
    assert form.dense.operands == (("float32", (3, 6)), ("float32", (6, 4)))
    assert form.key != form.dense.key
    assert form.dense.dense == form.dense


def test_pytorch_runs_a_kernel_for_each_node() -> None:
    """Its activations take what they take alone, not next to nothing as behind a session's Conv."""
    graph = graph_of(nn.Sequential(nn.Linear(6, 4), nn.GELU()), torch.ones(3, 6))
    (node,) = (node for node in graph.nodes if node.op == "aten::gelu")
    assert [one.op for one in chain(graph, node.name)] == ["aten::addmm"]
    placed = place(graph, node, DeviceMesh.single(0), {}, Rules.of(graph).rule(node))
    form = form_of(graph, placed, lambda at: shape_at({}, at))
    assert form == form.alone
