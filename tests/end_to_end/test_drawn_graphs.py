"""Random ONNX graphs on 2, 3, 5, 2 x 2 and 2 x 3 devices: what all ranks compute is the whole's."""

import pytest

from helpers.drawn.drawn_graphs import Counts, ran_plans


def check(seeds: range) -> Counts:
    """Run four plans of each graph; a fault fails."""
    counts = Counts()
    for seed in seeds:
        counts.add(seed, ran_plans(seed, 4))
    assert not counts.faults, "\n".join(counts.faults)
    return counts


@pytest.mark.slow
def test_drawn_graphs_are_cut_as_the_whole() -> None:
    counts = check(range(100, 118))
    assert counts.ends["equal"] > 55
    assert counts.cut > 300


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_more_drawn_graphs_are_cut_as_the_whole(first: int) -> None:
    check(range(first, first + 100))
