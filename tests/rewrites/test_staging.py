"""Stages of all nodes, from those of the forward pass."""

import pytest
from torch import Tensor, nn

from helpers.modules.staged_models import Detached, Model, Plain, Tied, Towers, UNet, seeded
from helpers.plans.staged import equal_stages
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_micro_batch
from partitioner.ir.graph import Graph
from partitioner.rewrites.staging import changing_nodes, stages_of_all


def graph_of(module: nn.Module, batch: tuple[Tensor, ...], *, training: bool = True) -> Graph:
    return trace_micro_batch(module, Example(batch, {}), ModuleOptions(training), 4).graph


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", [Tied, UNet, Towers, Plain])
def test_gradients_flow_to_lower_stages_and_values_to_higher_ones(kind: Model, count: int) -> None:
    graph = graph_of(seeded(kind), kind.batch(0))
    stages = stages_of_all(graph, equal_stages(graph, count))
    assert stages.keys() == graph.by_name.keys()
    assert set(stages.values()) == set(range(count))
    forward = {node.name for node in graph.nodes} - graph.backward
    for node in changing_nodes(graph):
        for value in node.reads:
            if value in graph.producers and graph.producers[value].name in forward:
                assert stages[graph.producers[value].name] <= stages[node.name]
    for name, twin in graph.twins.items():
        assert stages[name] <= stages[twin] or name.endswith("again")


def test_an_update_and_its_buffer_are_where_the_buffer_is_read_first() -> None:
    graph = graph_of(seeded(UNet), UNet.batch(0))
    names = {node.name for node in changing_nodes(graph)}
    assert "/norm/running_mean" not in names
    assert "/norm/running_mean/next" not in names
    for count in range(2, 8):
        stages = stages_of_all(graph, equal_stages(graph, count))
        for buffer in ("running_mean", "running_var"):
            reader = stages["/norm/batch_norm_running"]
            assert stages[f"/norm/{buffer}"] == stages[f"/norm/{buffer}/next"] == reader
        assert stages["/norm/num_batches_tracked"] == stages["/norm/add"]


def test_the_gradient_of_a_norm_is_at_its_result_not_at_its_running_mean() -> None:
    graph = graph_of(seeded(UNet), UNet.batch(0))
    assert graph.twins["/norm/batch_norm_grad_sums"] == "/norm/batch_norm_apply"


def test_a_forward_value_for_the_backward_pass_is_at_its_reader() -> None:
    graph = graph_of(seeded(Plain), Plain.batch(0))
    names = [node.name for node in changing_nodes(graph)]
    cut = names.index("/masked_fill")
    assert "/eq" in names[:cut]
    forward = {name: int(at >= cut) for at, name in enumerate(names)}
    stages = stages_of_all(graph, forward)
    assert stages["/eq/backward"] == stages["/masked_fill_1"] == 1


def test_a_gradient_is_where_its_parameter_is() -> None:
    graph = graph_of(seeded(Detached), Plain.batch(0))
    stages = stages_of_all(graph, equal_stages(graph, 3))
    made = graph.by_name["/gate/gradient"].inputs[0]
    assert stages["/gate/gradient"] == stages["/gate"] == 0
    assert stages[graph.producers[made].name] > 0


def test_inference_has_no_backward_nodes() -> None:
    graph = graph_of(seeded(Plain).eval(), Plain.batch(0), training=False)
    stages = stages_of_all(graph, equal_stages(graph, 2))
    assert stages.keys() == graph.by_name.keys()
