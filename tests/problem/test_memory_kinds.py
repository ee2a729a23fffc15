"""Bytes at a device's peak, by kind: their sums are the peak, the largest is named first."""

import pytest

from helpers.plans import staged_plans
from partitioner.ir.graph import Graph
from partitioner.problem.memory_kinds import Holdings, Kinds, parts_text


def test_the_largest_kind_is_named_first_and_none_without_bytes() -> None:
    parts = {"weights": 3, "gradients": 0, "activations": 2048, "zeros": 40}
    assert parts_text(parts) == "2 KiB activations, 40 B zeros, 3 B weights"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "replicated"])
def test_the_kinds_of_a_device_are_its_peak(name: str, exact: bool) -> None:
    result = staged_plans.staged(name)
    holdings = Holdings.of(result.graph, result.plan, result.cluster)
    peaks = result.evaluation.exact_peak if exact else result.evaluation.peak
    for device, peak in peaks.items():
        parts = holdings.at_peak(device, exact=exact)
        assert sum(parts.values()) == pytest.approx(peak.bytes, abs=len(parts))
        kept = parts["parameters"] + parts["optimizer's state"]
        assert kept == peak.resident_bytes
        assert parts["optimizer's state"] == 2 * parts["parameters"]  # AdamW keeps two moments


def values(graph: Graph, role: str) -> set[str]:
    return {node.inputs[0] for node in graph.nodes if node.attrs.get("role") == role}


def test_gradients_are_of_their_own_kind_through_views() -> None:
    graph = staged_plans.traced(4).graph
    kinds, gradients = Kinds(graph), values(graph, "gradient")
    assert gradients
    assert {kinds.passing(value, buffer=True) for value in gradients} == {"gradients"}
    assert kinds.passing(graph.inputs[0], buffer=False) == "activations"
    assert kinds.passing(graph.inputs[0], buffer=True) == "buffers of communications"
