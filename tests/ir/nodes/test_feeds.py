"""Results that are inputs of the next call: their names, and types that fit."""

import re

import pytest

from partitioner.ir.errors import OptionError
from partitioner.ir.nodes.feeds import grown_dim, named_pairs
from partitioner.ir.types import TensorType

RESULTS = ("logits", "present.0.key", "present.0.value", "present.1.key")
INPUTS = ("input_ids", "past.0.key", "past.0.value", "past.1.key")


def test_a_star_stands_for_the_same_text_in_both_names() -> None:
    wanted = {f"present.{name}": f"past.{name}" for name in ("0.key", "0.value", "1.key")}
    assert named_pairs({"present.*": "past.*"}, RESULTS, INPUTS) == wanted
    keys = {"present.*.key": "past.*.key"}
    assert named_pairs(keys, RESULTS, INPUTS) == {n: wanted[n] for n in wanted if "key" in n}
    assert named_pairs({"present.0.key": "past.0.key"}, RESULTS, INPUTS) == {
        "present.0.key": "past.0.key"
    }
    assert named_pairs({}, RESULTS, INPUTS) == {}
    # other characters of a name are no pattern
    with pytest.raises(OptionError, match=r"no result 'present\?0\.key'"):
        named_pairs({"present?0.key": "past.0.key"}, RESULTS, INPUTS)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({"presents.*": "past.*"}, "the model has no result 'presents.*'"),
        ({"present.*": "pasts.*"}, "'present.0.key' would become 'pasts.0.key', no input; did you"),
        ({"present.*": "past.0.key"}, "give one * on both sides, or none"),
        ({"pres*.*": "past*.*"}, "give one * on both sides, or none"),
        ({"logits": "past.0.key", "present.0.key": "past.0.key"}, "would be several results"),
        (
            {"present.*": "past.*", "present.0.key": "past.1.key"},
            "'present.0.key' already becomes 'past.0.key'",
        ),
        ({"logits": 3}, "feed has an int, not a name"),
    ],
)
def test_a_refusal_says_which_name_is_wrong(feed: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        named_pairs(feed, RESULTS, INPUTS)


def test_a_result_may_be_longer_in_one_dim() -> None:
    def dim(result: tuple[int, ...], fed: tuple[int, ...], dtype: str = "float32") -> int | None:
        return grown_dim("feed y=x", TensorType.of("float32", result), TensorType.of(dtype, fed))

    assert dim((1, 4, 8), (1, 4, 8)) is None
    assert dim((1, 5, 8), (1, 4, 8)) == 1
    for wrong in (((1, 3, 8), (1, 4, 8)), ((2, 5, 8), (1, 4, 8)), ((4, 8), (1, 4, 8))):
        with pytest.raises(
            OptionError, match=r"feed y=x: a result of .* cannot become an input of type"
        ):
            dim(*wrong)
    with pytest.raises(OptionError, match="cannot become an input of type"):
        dim((1, 4, 8), (1, 4, 8), "float16")
