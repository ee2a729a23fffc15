"""The one exception root. Every folder of the package subclasses it."""


class PartitionerError(Exception):
    """Root of the errors that a user can cause; the CLI prints it as one line.

    Attributes:
        exit_code: What the command line exits with (1 bad input, 2 usage, 3 infeasible).
    """

    exit_code = 1


class OptionError(PartitionerError, ValueError):
    """An option that cannot be understood, or options that contradict each other: wrong usage."""

    exit_code = 2


class IRError(PartitionerError, ValueError):
    """A graph, mesh, layout, rule, plan or program that breaks its own rules."""
