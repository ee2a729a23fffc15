"""The output of the commands: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.report.text.tables import safe, shortened

if TYPE_CHECKING:
    from partitioner.api.compiled.base import Compiled

#: Columns of a terminal beside the stage: the spinner and the seconds.
_BESIDE = 12


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


def on_terminal() -> AbstractContextManager[Callable[[str], None]]:
    """Show as `progress` does what is being done, on a terminal alone."""
    return progress(quiet=not sys.stderr.isatty())


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
        from rich.progress import Progress, SpinnerColumn, TextColumn

        console = Console(stderr=True)  # or NO_COLOR
        stage = TextColumn("{task.description}", markup=False)
        spent = TextColumn("{task.elapsed:.0f} s", style="dim")
        columns = (SpinnerColumn(style="cyan"), stage, spent)
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as live:
            line, room = live.add_task("starting"), max(1, console.width - _BESIDE)
            yield lambda text: live.reset(line, description=shortened(safe(text), room))
    else:
        yield lambda text: print(f"partition: {safe(text)} ...", file=sys.stderr, flush=True)
