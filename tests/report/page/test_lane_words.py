"""What a lane runs, in words: ranges of layers, parts of layers, modules, runs of nodes."""

from collections.abc import Sequence

import pytest

from partitioner.ir.pieces.folding import Path, module_path
from partitioner.report.page.lane_words import LaneWords

#: Nodes of a model of four layers, by name; each takes a second.
MODEL = (
    "model/wte/embedding",
    *(
        f"model/h/{layer}/{part}"
        for layer in range(4)
        for part in ("ln_1/norm", "attn/mm", "attn/softmax", "mlp/mm", "add")
    ),
    "lm_head/mm",
)


def words(
    names: Sequence[str], seconds: Sequence[float] = (), paths: Sequence[Path] | None = None
) -> LaneWords:
    every = seconds or [1.0] * len(names)
    told = [module_path(name) for name in names] if paths is None else paths
    return LaneWords(names, [name.split("/")[-1] for name in names], told, dict(enumerate(every)))


def between(first: int, stop: int) -> set[int]:
    return set(range(first, stop))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (between(0, 22), "wte, layers 0-3, lm_head"),
        (between(0, 6), "wte, layer 0"),
        (between(0, 9), "wte, layer 0, layer 1 to attn"),
        (between(9, 22), "layer 1 from mlp, layers 2-3, lm_head"),
        (between(2, 5), "attn to mlp of layer 0"),
        (between(2, 4), "attn of layer 0"),
        ({1, 3, 5}, "part of layer 0"),
        ({10}, "layer 1 from add"),
        (between(1, 6) | between(11, 16), "layers 0, 2"),
        (set(), ""),
    ],
)
def test_layers_that_follow_each_other_are_ranges(own: set[int], text: str) -> None:
    assert words(MODEL).text(own) == text


def test_of_ninety_layers_none_is_dropped() -> None:
    names = [f"layers/{layer}/{part}/mm" for layer in range(96) for part in ("attn", "mlp")]
    assert words(names).text(between(0, 181)) == "layers 0-89, layer 90 to attn"


def test_what_takes_little_time_is_counted() -> None:
    seconds = [0.001, *[1.0] * 20, 0.001]
    assert words(MODEL, seconds).text(between(0, 22)) == "layers 0-3, 2 more operators"
    assert words(MODEL, seconds).text(between(0, 6)) == "layer 0, 1 more operator"


def test_layers_of_several_kinds_have_the_names_of_their_kinds() -> None:
    names = [
        f"model/{side}/block/{layer}/mm" for side in ("encoder", "decoder") for layer in range(3)
    ]
    text = words([*names, "model/norm/mm"]).text(between(1, 7))
    assert text == "encoder.block.1-2, decoder.block.0-2, norm"


def test_layers_whose_numbers_leave_gaps_follow_each_other() -> None:
    names = [f"net/{layer}/mm" for layer in (0, 2, 4, 6)]
    assert words(names).text({0, 1, 2}) == "layers 0-4"
    assert words(names).text({0, 2}) == "layers 0, 4"


def test_operators_outside_modules_have_their_names() -> None:
    names = ["embed", *(f"layers/{at}/mm" for at in range(4)), "logits"]
    assert words(names).text(between(0, 6)) == "embed, layers 0-3, logits"
    assert words(["model/add", *MODEL]).text({0}) == "add"


def test_without_names_runs_of_nodes_are_told() -> None:
    names = [f"n{at}" for at in range(12)]
    bare = words(names, paths=[("\0block.0",)] * 12)
    assert bare.text(between(0, 7)) == "n0 to n6"
    assert bare.text({0, 1, 4}) == "n0 to n1, n4"
    assert bare.text({0, 1, 2, 4, 6, 7, 9}) == "n0 to n2, n4, n6 to n7, 1 more operator"
    hostile = words(["x" * 10_000, "y"], paths=[(), ()])
    assert len(hostile.text({0})) == 24
