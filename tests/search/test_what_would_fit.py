"""The least number of devices that a refused request would fit on."""

import pytest
from drawn_plans import mlp
from small_gpt import small_gpt

import partitioner
from partitioner.cost_model.memory import kept_bytes
from partitioner.frontends.onnx.load import load_onnx
from partitioner.search.what_would_fit import MOST_TIMES, _least_count


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("enough", [6, 7, 11, 16])
@pytest.mark.parametrize("least", [0, 4])
def test_the_least_count_is_found_and_none_is_tried_that_cannot_fit(
    devices: int, enough: int, least: int
) -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count >= enough

    assert _least_count(devices, fits, 10.0, least) == enough
    assert min(tried) > devices
    assert all(count >= least for count in tried)


def test_nothing_is_tried_where_the_weights_alone_want_too_many_devices() -> None:
    def fits(count: int) -> bool:
        raise AssertionError(count)

    assert _least_count(2, fits, 10.0, 2 * MOST_TIMES + 1) is None


@pytest.mark.parametrize(
    ("parallel", "devices"), [("dp", 1), ("zero3", 2), ("zero3", 3), ("zero1", 3), ("tp", 2)]
)
def test_no_devices_keep_less_together_in_training(parallel: str, devices: int) -> None:
    model, batch = small_gpt()
    options = {"parallel": parallel} if devices > 1 else {}
    program = partitioner.compile(
        *(model, batch, devices), training=True, time_limit_s=10, **options
    )
    peaks = program.evaluation.peak.values()
    together = sum(peak.resident_bytes for peak in peaks)
    assert kept_bytes(program.graph) <= together
    if devices == 1:
        assert kept_bytes(program.graph) == together


def test_what_devices_keep_together_are_the_weights() -> None:
    graph = load_onnx(mlp(layers=3, hidden=8, batch=4)).graph
    weights = sum(constant.load().nbytes for constant in graph.constants.values())
    assert kept_bytes(graph) == weights > 3 * 8 * 8 * 4
