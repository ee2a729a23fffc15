"""The commands as one Typer application."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.main import get_command

from partitioner.cli.export import export, join
from partitioner.cli.pictures import check, draw
from partitioner.cli.plan import plan
from partitioner.cli.report import diff, explain, fit, report, show, sweep
from partitioner.cli.run import calibrate, profile, run, verify
from partitioner.cli.schedule import schedule
from partitioner.cli.solve import evaluate, solve
from partitioner.ir.errors import did_you_mean

_ABOUT = """Split a model over devices: a plan with a bound, and one runnable subgraph for each.

`partition MODEL ...` is short for `partition plan MODEL ...`: see `partition plan --help`.
If your model file is called like a command, put its folder before it: `partition ./run`.
"""

#: The commands in the order of the help, by its panels.
_PANELS: Mapping[str, Sequence[Callable[..., int]]] = {
    "A model": (plan, fit, sweep, profile),
    "A folder that `partition MODEL` wrote": (
        *(show, explain, report, diff, draw),
        *(verify, run, calibrate, join, export),
    ),
    "A problem file": (solve, evaluate),
    "Other files": (check, schedule),
}
COMMANDS = tuple(function.__name__ for panel in _PANELS.values() for function in panel)
#: Words for a command that people try first, as `compile` is its name in Python.
_ALSO: Mapping[str, str] = {"compile": "plan", "partition": "plan", "split": "plan"}
#: Options that are of `partition` itself.
_OWN = ("--help", "-h", "--install-completion", "--show-completion")


class UnknownCommandError(typer.TyperException):
    """A first argument that is neither a command nor a model."""


def run_command(argv: Sequence[str]) -> int:
    """Run the command that the arguments name, `plan` if they begin with a model; its exit code."""
    argv = list(argv)
    if argv[:1] == ["help"] and not os.path.lexists("help"):  # `help`, `help COMMAND`
        command = _ALSO.get(argv[1], argv[1]) if len(argv) > 1 else ""
        if command in ("", "help") or command.startswith("-"):
            argv = ["--help"]
        elif command in COMMANDS:
            argv = [command, "--help"]
        else:
            raise _unknown(command)
    if not argv or (argv[0] not in COMMANDS and argv[0].partition("=")[0] not in _OWN):
        _check_command(argv)
        argv = ["plan", *argv] if argv else ["--help"]
    code = command_line().main(args=argv, prog_name="partition", standalone_mode=False)
    return int(code or 0)


def usage_line(error: typer.TyperException, argv: Sequence[str]) -> str:
    """A wrong usage in one line, with the command whose help says more."""
    context = getattr(error, "ctx", None)
    called = argv[0] if argv and argv[0] in COMMANDS else "plan"
    command = "partition" if isinstance(error, UnknownCommandError) else f"partition {called}"
    command = command if context is None else context.command_path
    message = " ".join(error.format_message().split()).removesuffix(".")
    message = message.removeprefix("Invalid value: ")
    message = re.sub(r" \(Possible options: (.*)\)$", r"; did you mean \1?", message)
    return f"{command}: {message} (see {command} --help)"


@cache
def command_line() -> Any:
    """The command line, made once a process: typer reads every function's signature."""
    application = typer.Typer(
        help=_ABOUT,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    application.callback()(_options)
    for panel, functions in _PANELS.items():
        for function in functions:
            application.command(function.__name__, rich_help_panel=panel)(function)
    return get_command(application)


def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """The options of `partition` itself, for its help: `main` answers `--version`."""
    del version


def _check_command(argv: Sequence[str]) -> None:
    """Refuse a first argument that can only be a misspelt command, with the commands there are."""
    word = argv[0] if argv else ""
    asks_for_help = word in _ALSO and not {"--help", "-h"}.isdisjoint(argv)
    if not word.isalpha() or os.path.lexists(word) or asks_for_help:
        return
    has_operand = len(argv) > 1 and not argv[1].startswith("-")
    if has_operand or word in _ALSO or did_you_mean(word, COMMANDS):
        raise _unknown(word)


def _unknown(word: str) -> UnknownCommandError:
    known = ", ".join(COMMANDS)
    hint = did_you_mean(word, COMMANDS)
    if word in _ALSO:
        hint = f"; did you mean 'partition {_ALSO[word]} MODEL', for short 'partition MODEL'?"
    return UnknownCommandError(f"unknown command {word!r} (there are {known}){hint}")
