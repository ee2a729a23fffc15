"""Tables of options, made from `api.option_table` and the commands when the site is built.

``{{ options of COMMAND }}`` on a page becomes the usage of a command and a table of its options,
``{{ keywords of FUNCTION }}`` a table of the keyword arguments of a public function.
"""

import html
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.pages import Page

import partitioner
from partitioner.api.option_table import (
    CompileOptions,
    DumpOptions,
    FitOptions,
    Option,
    ProfileOptions,
    SweepOptions,
    described,
)
from partitioner.cli.app import command_line

#: The table of each public function and command that has one.
TABLES: dict[str, type] = {
    "compile": CompileOptions,
    "plan": CompileOptions,
    "fit": FitOptions,
    "sweep": SweepOptions,
    "profile": ProfileOptions,
    "dump_problem": DumpOptions,
}


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Put tables in place of their names."""
    return with_tables(markdown, page.file.src_uri)


def with_tables(markdown: str, page: str) -> str:
    """The text of a page, by its path below `docs/`, with tables in place of their names."""
    makers: dict[str, Callable[[str, str], str]] = {"options": options, "keywords": keywords}

    folder = str(Path(page).parent)

    def made(found: re.Match[str]) -> str:
        return makers[found[1]](found[2], folder)

    return re.sub(r"^\{\{ (options|keywords) of (\w+) \}\}$", made, markdown, flags=re.MULTILINE)


def options(command: str, folder: str) -> str:
    """The usage of a command, and a table of its options by their panels."""
    made = command_line().commands[command]
    shown = [one for one in made.params if one.name != "help"]
    pieces = [_usage(one) for one in shown]
    usage = textwrap.fill(
        " ".join([f"partition {command}", *(piece.replace(" ", "\0") for piece in pieces)]),
        80,
        subsequent_indent=10 * " ",
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")
    rows = list(_rows(command, shown, folder))
    table = ["", "| option | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join(["```text", usage, "```", *table])


def _rows(command: str, shown: list[Any], folder: str) -> Iterator[str]:
    table = described(TABLES[command]) if command in TABLES else {}
    panels = dict.fromkeys(one.rich_help_panel for one in shown if _is_option(one))
    for panel in panels:
        if len(panels) > 1:
            yield f"| **{panel}** | |"
        for one in shown:
            if _is_option(one) and one.rich_help_panel == panel:
                row = table.get(one.name)
                text = one.help if row is None else row.reference + _link(row, folder)
                short = "".join(f", `{name}`" for name in one.opts[1:])
                name = " ".join([one.opts[0], *_value(one)])
                yield f"| {_in_cell(f'`{name}`{short}')} | {_in_cell(text)} |"


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _usage(parameter: Any) -> str:
    if not _is_option(parameter):
        name = parameter.metavar or parameter.name.upper()
        return name if parameter.required else f"[{name}]"
    text = " ".join([parameter.opts[0], *_value(parameter)])
    return f"[{text}]{'...' if parameter.multiple else ''}"


def _value(option: Any) -> list[str]:
    """Value behind the name of an option, as the usage shows it; none of a flag."""
    if option.is_flag:
        return []
    return [option.metavar or "|".join(option.type.choices)]


def keywords(function: str, folder: str) -> str:
    """A table of the keyword arguments of a public function."""
    signature = inspect.signature(getattr(partitioner, function))
    rows = ["| keyword | type | default | meaning |", "|---|---|---|---|"]
    for name, row in described(TABLES[function]).items():
        parameter = signature.parameters[name]
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        cells = [f"`{name}`", f"`{_type(parameter.annotation)}`", default]
        cells.append(row.python_help + _link(row, folder))
        rows.append(f"| {' | '.join(_in_cell(cell) for cell in cells)} |")
    return "\n".join(rows)


def _type(annotation: Any) -> str:
    """A type as one writes it, without the modules of its names."""
    text = re.sub(r"\b(?:[a-z_]\w*\.)+", "", inspect.formatannotation(annotation))
    union = re.fullmatch(r"Union\[(.*)\]", text)
    if union:
        text = " | ".join(re.split(r", (?![^\[]*\])", union[1]))
    return text.replace("NoneType", "None")


def _link(row: Option, folder: str) -> str:
    return f" [More]({os.path.relpath(row.see, folder)})" if row.see else ""


def _in_cell(text: str) -> str:
    """Text of a table's cell; a bar in backticks cannot be escaped there."""

    def code(found: re.Match[str]) -> str:
        return f"<code>{html.escape(found[1])}</code>" if "|" in found[1] else found[0]

    return re.sub(r"`(.*?)`", code, text).replace("|", "&#124;")
