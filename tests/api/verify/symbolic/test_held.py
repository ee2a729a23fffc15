"""Values that are several parts alike are joined as parts that are apart from each other."""

from partitioner.api.verify.symbolic.held import Held, choices, of_one_value, reduced
from partitioner.api.verify.symbolic.parts import whole
from partitioner.api.verify.symbolic.shares import ALL, times

RANKS, ROWS = 5, 20


def test_terms_of_many_alike_are_added_up_once() -> None:
    """Ranks of 4 of 20 rows that are alike: of 17^5 choices, few have each row once."""
    loop = ("n", "k", ROWS)
    shares = [times(ALL, [(loop, ((at, 4),))]) for at in range(ROWS - 3)]
    facts = tuple(Held("v", (whole(3),), share, "sum") for share in shares)
    made = of_one_value(
        dict.fromkeys(range(RANKS), facts), lambda h: [reduced([*h.values()], "sum")]
    )
    assert Held("v", (whole(3),)) in made


def test_first_choice_is_of_options_that_are_apart() -> None:
    options = [[0, 1, 2], [0, 1, 2], [0], [1, 0]]
    found = [*choices(options, lambda a, b: a != b)]
    assert found[0] == (0, 1, 0, 1)
    assert len(found) == 1 + 3 * 3 * 1 * 2
    assert [*choices([[4], [4]], lambda a, b: a != b)] == [(4, 4)]
    assert not [*choices([[4], []], lambda a, b: a != b)]
