"""The table of options: each is described once, and all places that show options read it."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typing_extensions import Unpack

import partitioner
from partitioner.api import option_table
from partitioner.api.option_table import (
    PANELS,
    CompileOptions,
    DumpOptions,
    FitOptions,
    Option,
    ProfileOptions,
    SearchOptions,
    SweepOptions,
    described,
    filled,
    tables,
)
from partitioner.api.options import takes
from partitioner.cli import options as cli_options
from partitioner.cli.app import command_line
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.search.request import Request

DOCS = Path(partitioner.__file__).resolve().parents[1] / "docs"
TABLES = {
    "compile": CompileOptions,
    "sweep": SweepOptions,
    "fit": FitOptions,
    "profile": ProfileOptions,
    "dump_problem": DumpOptions,
}
COMMANDS = {
    "plan": CompileOptions,
    "sweep": SweepOptions,
    "fit": FitOptions,
    "profile": ProfileOptions,
}
ROWS = {
    f"{table}-{name}": row for table in TABLES for name, row in described(TABLES[table]).items()
}


@pytest.mark.parametrize("function", TABLES)
def test_every_keyword_is_described(function: str) -> None:
    assert described(TABLES[function]).keys() == TABLES[function].__annotations__.keys()
    docstring = inspect.getdoc(getattr(partitioner, function)) or ""
    words = " ".join(docstring.split())
    for name, row in described(TABLES[function]).items():
        assert f"{name}: {row.python_help}" in words


def test_each_table_is_of_a_keyword() -> None:
    of_functions = {name: rows for name, rows in tables().items() if name != "commands"}
    for function, rows in of_functions.items():
        if "text" not in rows:
            (options,) = [one for one in TABLES.values() if one.__name__ == function]
            assert rows.keys() <= options.__annotations__.keys()
            assert all(row != tables()[keyword] for keyword, row in rows.items())
        else:
            assert any(function in options.__annotations__ for options in TABLES.values())


@pytest.mark.parametrize("command", tables()["commands"])
def test_each_table_of_a_command_is_of_a_parameter(command: str) -> None:
    made = command_line().commands
    within = made.values() if command == "all" else [made[command]]
    helps = {one.help for each in within for one in each.params if hasattr(one, "help")}
    for row in tables()["commands"][command].values():
        assert Option(**row).text in helps


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_names_what_there_is(row: Option) -> None:
    assert row.panel in ("", *PANELS)
    assert row.form in cli_options.FORMS
    known = described(CompileOptions)
    for text in (row.text, row.more, row.command_text):
        assert not text or text.endswith((".", "..."))
        for other in re.findall(r"\{(\w+)(?:=[^}]*)?\}", text):
            assert other in known
            assert known[other].flag_of(other) == f"--{other}"
    page, _, anchor = row.see.partition("#")
    if page:
        headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings]
        assert not anchor or anchor in anchors


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_its_table(command: str) -> None:
    parameters = {one.name: one for one in command_line().commands[command].params}
    shown = {name: row for name, row in described(COMMANDS[command]).items() if row.panel}
    assert shown.keys() <= parameters.keys()
    for name, row in shown.items():
        assert parameters[name].opts == [row.flag_of(name)]
        assert parameters[name].help == row.help
        assert parameters[name].rich_help_panel == row.panel
    named = [one.rich_help_panel for one in parameters.values() if hasattr(one, "rich_help_panel")]
    panels = [one for one in dict.fromkeys(named) if one in PANELS]
    assert panels == sorted(panels, key=PANELS.index)
    unshown = COMMANDS[command].__annotations__.keys() - parameters.keys()
    assert unshown == {"loss", "progress", "target"}  # of Python alone


def test_texts_on_the_command_line_and_in_python() -> None:
    row = Option("With {training}: `sgd`.", more="See {cluster=local}.", command_text="")
    assert row.help == "With --training: sgd."
    assert row.python_help == 'With `training`: "sgd". See `cluster="local"`.'
    assert row.reference == "With `--training`: `sgd`. See `--cluster local`."


class MoreOptions(SearchOptions, total=False):
    """Options of a search and one more."""

    sparks: int | None
    bright: bool


MORE = {
    "sparks": {
        "text": "Sparks of {gap}.",
        "panel": "Search",
        "more": "At most `9`.",
        "form": "positive",
    },
    "bright": {"text": "Be bright.", "panel": "Search"},
}
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(option_table, "tables", lambda: {**tables(), **MORE})
    described(MoreOptions)  # from now on known


@takes(MoreOptions)
def search(model: str, **options: Unpack[MoreOptions]) -> MoreOptions:
    """Search.

    Args:
        model: The model.
        **options: As the fields of `MoreOptions` are described.
    """
    return {**options} if model else {}


@cli_options.takes(MoreOptions)
def run_search(model: cli_options.Model, *, quiet: cli_options.Quiet = False, **values: Any) -> int:
    """Search on the command line."""
    del quiet
    assert search(model, **cli_options.given(model, MoreOptions, values)) == {
        "sparks": 3,
        "gap": 0.5,
    }
    return 0


def test_an_option_needs_a_field_and_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import typer
    from typer.main import get_command

    sparks = inspect.signature(search).parameters["sparks"]
    assert (sparks.default, sparks.annotation) == (None, int | None)
    assert '        sparks: Sparks of `gap`. At most "9".' in (search.__doc__ or "")
    application = typer.Typer()
    application.command()(run_search)
    command = get_command(application)
    command.main(["--help"], standalone_mode=False)
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert re.search(r"Search --time-limit .* --sparks .* Sparks of --gap\. --bright", shown)
    arguments = ["m.onnx", "--sparks", "3", "--gap", "50%"]
    assert command.main(arguments, standalone_mode=False) == 0
    with pytest.raises(typer.BadParameter, match="'0' is not a whole number of at least 1"):
        command.main(["m.onnx", "--sparks", "0"], standalone_mode=False)


def test_a_request_has_the_options_of_a_search() -> None:
    keywords = CompileOptions.__annotations__.keys()
    assert {one.name for one in fields(Request)} - keywords == {"lanes"}
    assert {one.name for one in fields(ModuleOptions)} - keywords == {"at_rest", "loads"}
    defaults = inspect.signature(partitioner.compile).parameters
    for one in (*fields(Request), *fields(ModuleOptions)):
        if one.name in keywords - {"constraints"}:
            assert defaults[one.name].default == one.default


def test_types_need_nothing_that_the_table_does_not_name() -> None:
    for function, options in TABLES.items():
        parameters = inspect.signature(getattr(partitioner, function)).parameters
        for name in options.__annotations__:
            assert not isinstance(parameters[name].annotation, str)
    assert get_type_hints(MoreOptions, localns={"SolverName": str})["sparks"] == int | None


def test_a_docstring_without_the_line_is_left_alone() -> None:
    assert filled("Bake a cake.", MoreOptions) == "Bake a cake."
