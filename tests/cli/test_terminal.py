"""Progress: a line a stage in a pipe, one live line on a terminal."""

import io
import re

import pytest

from partitioner.cli.terminal import progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=False) as say:
        say("reading the model")
        say("search\x1b[2Jing")
    assert capsys.readouterr() == (
        "",
        "partition: reading the model ...\npartition: search?[2Jing ...\n",
    )


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as say:
        say("reading the model")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    with progress(quiet=False) as say:
        say("reading the model")
        say("searching " + "a long name of a space " * 10)
    written = terminal.getvalue()
    assert "reading the model" in written
    assert "partition:" not in written
    assert "\x1b[2K" in written.rpartition("searching")[2]  # the line is erased
    assert "…" in written
    assert " 0 s" in re.sub(r"\x1b\[\d*m", "", written).rpartition("searching")[2]


def test_colours_follow_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, coloured in ((None, True), ("1", False)):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if value:
            monkeypatch.setenv("NO_COLOR", value)
        with progress(quiet=False) as say:
            say("reading the model")
        assert ("\x1b[36m" in terminal.getvalue()) is coloured
