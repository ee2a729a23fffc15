"""Root of all exceptions of the package; every folder subclasses it."""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


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


def meant_keyword(error: TypeError, known: Iterable[str]) -> str:
    """The hint of `did_you_mean` if an error is of an unknown keyword argument; else nothing."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return did_you_mean(unknown[1], known) if unknown else ""


def hints_keywords(function: Function) -> Function:
    """Have calls of a function, or of a class and its methods, hint at unknown keywords."""
    if isinstance(function, type):
        for name, member in list(vars(function).items()):
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(member, classmethod):
                setattr(function, name, classmethod(hints_keywords(member.__func__)))
            elif isinstance(member, FunctionType):
                setattr(function, name, hints_keywords(member))
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:  # not from within the function
                from inspect import signature

                hint = meant_keyword(error, signature(function).parameters)
                if hint and "mean" not in str(error):  # Python 3.13 has its own
                    raise TypeError(f"{error}{hint}") from None
            raise

    return cast("Function", call)


def typed(value: object) -> str:
    """The type of a value in words: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' or name.startswith('nd') else 'a'} {name}"
