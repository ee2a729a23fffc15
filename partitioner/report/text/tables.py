"""Text for a terminal: tables within its width, without control characters."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

#: Columns that a cell keeps, however narrow the terminal is.
LEAST = 12
#: Columns of a legend where stdout is no terminal.
LEGEND = 97


def columns() -> int | None:
    """The terminal's width; None where stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Left-aligned columns below a header; long cells give way to `width` or the terminal's."""
    if width is None:
        width = columns()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        limit, total = max(widths, default=0), width - 2 * (len(widths) - 1)
        while limit > LEAST and sum(min(w, limit) for w in widths) > total:
            limit -= 1  # the widest columns give way
        widths = [min(w, limit) for w in widths]
    lines = [
        "  ".join(shortened(cell, w).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    rule = sum(widths) + 2 * (len(widths) - 1) if width is not None else len(lines[0])
    return [lines[0], "-" * min(rule, len(lines[0])), *lines[1:]]


def shortened(text: str, width: int) -> str:
    """The text, or its begin and end in `width` characters."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def legend(entries: Mapping[str, str]) -> list[str]:
    """Words with what they mean, each in lines below each other."""
    wide = max(map(len, entries)) + 2
    return [
        line
        for word, text in entries.items()
        for line in textwrap.wrap(
            text,
            max(columns() or LEGEND, wide + LEAST),
            initial_indent=word.ljust(wide),
            subsequent_indent=" " * wide,
        )
    ]


def safe(text: str) -> str:
    """Text that may hold a model's names, with "?" for each control character."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def fitted(text: str) -> str:
    """Safe text whose lines are within the terminal's width, if it is printed to one.

    What does not fit goes on in a line of its own, below what follows a line's label.
    """
    text, width = safe(text), columns()
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) > width and set(line) == {"-"}:  # the rule of a table
            lines.append(line[:width])
            continue
        label = re.match(r" *(?:\S+ {2,}|note: )?", line)
        indent = len(label[0]) if label is not None and len(label[0]) < width / 2 else 0
        lines += textwrap.wrap(line, width, subsequent_indent=" " * (indent or 2)) or [""]
    return "\n".join(lines)
