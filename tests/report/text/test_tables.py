"""Tables: the terminal's width, where there is one, and names shortened in their middle."""

import io
import os
import shutil

import pytest

from partitioner.report.text.tables import LEAST, fitted, shortened, table

ROWS = [
    ("node", "seconds", "tensor"),
    ("layers.0.attention.output.projection", "1.2 ms", "gpu_0/res5_2_branch2c_w_0"),
    ("x", "30 µs", "y"),
]


def test_without_a_terminal_nothing_is_shortened() -> None:
    lines = table(ROWS)
    assert "layers.0.attention.output.projection" in lines[2]
    assert "gpu_0/res5_2_branch2c_w_0" in lines[2]


@pytest.mark.parametrize("width", [30, 40, 60, 79])
def test_lines_fit_the_width(width: int) -> None:
    least = 2 * LEAST + len("seconds") + 4  # what is not shortened further
    lines = table(ROWS, width)
    assert max(map(len, lines)) <= max(width, least)
    assert "1.2 ms" in lines[2]


def test_a_wide_terminal_changes_nothing() -> None:
    assert table(ROWS, 200) == table(ROWS)


def test_the_terminal_gives_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((50, 20)))
    lines = table(ROWS)
    monkeypatch.undo()
    assert lines == table(ROWS, 50)
    assert max(map(len, lines)) <= 50


@pytest.mark.parametrize("width", range(1, 12))
def test_a_name_keeps_its_begin_and_end(width: int) -> None:
    text = shortened("0123456789", width)
    assert len(text) == min(width, 10)
    begin, _, end = text.partition("…")
    assert "0123456789".startswith(begin)
    assert "0123456789".endswith(end)


def test_lines_go_on_below_what_follows_their_label(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "llama: a verdict that is long\n  limit       one two three four five\n\nshort\x1b"
    plain = fitted(text)  # it is not printed to a terminal
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((30, 10)))
    lines, more = fitted(text).splitlines(), fitted("a verdict that is longer than it").splitlines()
    monkeypatch.undo()
    assert plain == text.replace("\x1b", "?")
    assert lines == [
        "llama: a verdict that is long",
        "  limit       one two three",
        "              four five",
        "",
        "short?",
    ]
    assert more[1] == "  it"
