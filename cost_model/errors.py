"""The folder's exception."""

from partitioner.ir.errors import OptionError, PartitionerError


class CostError(PartitionerError, ValueError):
    """A cluster, size or objective that cannot be understood or had."""


class ClusterOptionError(CostError, OptionError):
    """A cluster's name or a number of devices that means nothing, or two that disagree."""

    exit_code = OptionError.exit_code
