"""The public features, and the test files that name each.

    python tests/helpers/pages/public_features.py      a table in Markdown

Features are what users write: names of the package, keywords of its functions, methods of its
classes, commands with their options, and the values that choose among built-in ways. A test file
names a feature where it writes it as users do; that it checks it, only a reader can tell.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import partitioner
from partitioner import functional
from partitioner.cli.app import command_line
from partitioner.cost_model.cluster.launches import launches
from partitioner.frontends.torch.options import OPTIMIZERS
from partitioner.ir.pipeline.generate import SCHEDULES
from partitioner.ir.plan import OBJECTIVES
from partitioner.strategies.kinds.parallel import KINDS

TESTS = Path(__file__).parents[2]
#: Values that users choose from, by the option that takes them. Solvers other than these two are
#: not installed where tests run, and presets are rows of a file that tests read as a whole.
VALUES: Mapping[str, tuple[str, ...]] = {
    "parallel": tuple(KINDS),
    "schedule": SCHEDULES,
    "optimizer": tuple(OPTIMIZERS),
    "solver": ("highs", "cbc"),
    "objective": OBJECTIVES,
    "strategy": ("auto", "intra", "inter", "copies"),
    "launches": tuple(launches()),
}
#: Classes whose methods are the library's own; users make them.
TABLES = ("Cluster", "Constraints")


def features() -> Iterator[tuple[str, str]]:
    """Yield each feature as users write it, with the pattern of what names it in a test."""
    for name in partitioner.__all__:
        yield f"partitioner.{name}", rf"\b{name}\b"
        yield from _members(name, getattr(partitioner, name))
    for name in functional.__all__:
        yield f"partitioner.functional.{name}", rf"\b{name}\b"
    for command, described in sorted(_commands().items()):
        yield f"partition {command}", _value(command)
        for option in described.params:
            if option.opts[0].startswith("--"):
                flags = "|".join(sorted({*option.opts, *option.secondary_opts}))
                yield f"partition {command} {option.opts[0]}", rf"({flags})\b"
    for option, values in VALUES.items():
        for value in values:
            yield f'{option}="{value}"', _value(value)


@cache
def _tests() -> Mapping[str, str]:
    """The text of each test file, by its path below `tests/`."""
    paths = sorted((*TESTS.rglob("test_*.py"), *TESTS.glob("jobs/**/*.py")))
    return {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def files_naming(feature: str, pattern: str) -> Iterator[str]:
    """The test files that name a feature."""
    word = re.findall(r"[\w-]+", feature)[-1].removeprefix("--")  # looked for first: it is faster
    names = re.compile(pattern)
    return (name for name, text in _tests().items() if word in text and names.search(text))


def _members(name: str, value: object) -> Iterator[tuple[str, str]]:
    """The keywords of a function, or the methods of a class; of a table only what makes one.

    `on_ranks` is called by the library itself.
    """
    if name in TABLES:
        for member, kind in vars(value).items():
            if isinstance(kind, classmethod) and not member.startswith("_"):
                yield f"{name}.{member}", rf"\b{name}[.]{member}\("
    elif inspect.isclass(value) and not issubclass(value, BaseException):
        for member, kind in vars(value).items():
            if inspect.isfunction(kind) and member != "on_ranks" and not member.startswith("_"):
                yield f"{name}.{member}", rf"[.]{member}\("
    elif not inspect.isclass(value) and callable(value):
        for keyword, parameter in inspect.signature(value).parameters.items():
            if parameter.kind == parameter.KEYWORD_ONLY:
                yield f"{name}({keyword}=)", rf"\b{keyword}=|[\"']{keyword}[\"']:"


def _value(word: str) -> str:
    """The pattern of a word in a text, as in "a b", "a+b", "--x=b"."""
    return rf"[\"' =+]{re.escape(word)}[\"' +]"


def _commands() -> Mapping[str, Any]:
    return cast("Any", command_line()).commands  # type: ignore[no-any-return]


def main() -> None:
    print("| feature | test files |\n|---|---|")
    for feature, pattern in features():
        files = list(files_naming(feature, pattern))
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        print(f"| `{feature}` | {', '.join(files[:3])}{more} |")


if __name__ == "__main__":
    main()
