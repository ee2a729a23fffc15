"""The output of the commands: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.report.text.tables import safe, shortened

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from partitioner.api.compiled.base import Compiled


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return safe(" ".join(str(error).split()))


def aside(line: str) -> None:
    """Print a line on stderr."""
    print(f"partition: {safe(line)}", file=sys.stderr)


def looked_at(*folders: Path) -> list[Compiled]:
    """Saved plans, whose warnings are printed on stderr."""
    from partitioner.api.compiled.reload import look

    plans = [look(folder) for folder in folders]
    warn(dict.fromkeys(line for plan in plans for line in plan.warnings))  # they may be the same
    return plans


def warn(lines: Iterable[str]) -> None:
    """Print a saved plan's warnings on stderr."""
    for line in lines:
        aside(f"warning: {line}")


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, on stderr.

    On a terminal one line shows the present stage and its seconds, and is gone at the end;
    elsewhere each stage is a line. `quiet` shows nothing.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        line, console = _Line("starting", time.monotonic()), Console(stderr=True)  # or NO_COLOR
        with Live(line, console=console, transient=True, refresh_per_second=4) as live:
            yield lambda text: live.update(_Line(safe(text), time.monotonic()), refresh=True)
    else:
        yield lambda text: print(f"partition: {safe(text)} ...", file=sys.stderr, flush=True)


_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(frozen=True)
class _Line:
    """A stage and the seconds since it began, in the width of the terminal."""

    stage: str
    began_s: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        spent_s = time.monotonic() - self.began_s
        frame, clock = _FRAMES[int(4 * spent_s) % len(_FRAMES)], f"{spent_s:.0f} s"
        stage = shortened(self.stage, max(1, options.max_width - len(clock) - 4))
        yield Text.assemble((frame, "cyan"), f" {stage} ", (clock, "dim"), no_wrap=True)
