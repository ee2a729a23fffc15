"""Text from a model as printable text of limited length."""

import pytest

from partitioner.report.pictures.canvas import shorten, shown, tint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("a\tb", "a\\tb"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("\u6f22\u5b57", "\u6f22\u5b57"),
        ("", ""),
    ],
)
def test_unseen_characters_are_escaped(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize("limit", [1, 2, 8, 19, 20, 60])
def test_nothing_is_longer_than_the_limit(limit: int) -> None:
    for text in ("x" * 10_000, "\x00" * 10_000, "ab", "x" * limit, "x" * (limit + 1)):
        assert len(shown(text, limit)) == min(limit, len(shown(text, 10**6)))


def test_the_end_is_kept() -> None:
    assert shorten("model.layers.11.attention", 10) == "\u2026attention"
    assert shorten("model.layers.11.attention", 22) == "model.l\u2026s.11.attention"


def test_tints_go_to_white() -> None:
    assert tint("#0072B2", 1.0) == "#0072B2"
    assert tint("#0072B2", 0.0) == "#FFFFFF"
