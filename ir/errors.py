"""Root of all exceptions of the package; every folder subclasses it."""

from collections.abc import Iterator
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
