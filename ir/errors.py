"""Root of all exceptions of the package; every folder subclasses it."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PartitionerError(Exception):
    """Root of the errors that a user can cause; the CLI prints it as one line."""

    exit_code = 1  #: Of the command: 1 bad input, 2 usage, 3 infeasible.


class OptionError(PartitionerError, ValueError):
    """Wrong usage: an option that is malformed, or options that contradict each other."""

    exit_code = 2


class IRError(PartitionerError, ValueError):
    """A graph, mesh, layout, rule, plan or program that breaks its own rules."""


@contextmanager
def naming(what: str, kind: type[PartitionerError]) -> Iterator[None]:
    """Raise any other error than ours as one of `kind`, on one line that begins with `what`."""
    try:
        yield
    except PartitionerError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise kind(f"{what}: {type(error).__name__}: {text}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'batch'?"`` for a misspelt name; nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=2)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def typed(value: object) -> str:
    """The type of a value in words: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' or name.startswith('nd') else 'a'} {name}"
