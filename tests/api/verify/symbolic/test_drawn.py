"""Plans drawn at random are proven, and their faults that change a result are refused.

More of them: `python tests/benchmarks/mutations.py --drawn KIND`.
"""

import pytest

from helpers.plans.drawn_mutations import Ends, tried_drawn


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        ("graphs", (0,)),
        pytest.param("graphs", (1, 2, 3), marks=pytest.mark.slow),
        pytest.param("training", (0,), marks=pytest.mark.slow),
        pytest.param("layouts", (1, 3), marks=pytest.mark.slow),
        pytest.param("stages", (0,), marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_faults_of_drawn_plans_are_refused(kind: str, seeds: tuple[int, ...]) -> None:
    ends = Ends()
    for seed in seeds:
        tried_drawn(kind, seed, ends, 1)
    assert not ends.wrong
    assert not ends.survived
    assert ends.verdicts["proven"]
    assert sum(count.refused for count in ends.by_kind.values()) > 5
