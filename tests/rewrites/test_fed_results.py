"""The graph whose results are inputs of the next call: what reads them, and what makes them."""

import pytest

from helpers.onnx_files import gpt
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import OptionError
from partitioner.ir.nodes.feeds import fed_pairs
from partitioner.ir.ops.onnx.feeding import FEED
from partitioner.rewrites.fed_results import with_fed_results


@pytest.mark.parametrize("style", ["written", "grown"])
def test_readers_and_the_result_share_a_layout(style: gpt.Style) -> None:
    plain = load_onnx(gpt.gpt(style), {"past": 16} if style == "grown" else {}).graph
    graph = with_fed_results(plain, gpt.FEED)
    assert (graph.inputs, graph.outputs) == (plain.inputs, plain.outputs)
    assert fed_pairs(graph) == {
        name: name.replace("present", "past_key_values") for name in plain.outputs[1:]
    }
    assert fed_pairs(plain) == {}
    for result, value in fed_pairs(graph).items():
        (held,) = graph.consumers[value]
        assert held.op == "Identity"
        feed = graph.producers[result]
        assert feed.op == FEED
        assert feed.inputs[1] == held.outputs[0]
        made = graph.producers[feed.inputs[0]]
        assert made.name == plain.producers[result].name
        # both stand beside the node that they belong to, so that no other lies between
        assert graph.order[feed.name] == graph.order[made.name] + 1
        first = graph.consumers[held.outputs[0]][0]
        assert graph.order[held.name] < graph.order[first.name]
    assert graph.digest != plain.digest
    assert with_fed_results(plain, {}) is plain


def test_a_refusal_names_the_pair() -> None:
    plain = load_onnx(gpt.gpt("written")).graph
    message = "feed logits=past_key_values.0.key: a result of type .* cannot become an input"
    with pytest.raises(OptionError, match=message):
        with_fed_results(plain, {"logits": "past_key_values.0.key"})
