"""The folder's exception."""

from partitioner.ir.errors import OptionError, PartitionerError


class CostError(PartitionerError, ValueError):
    """A cluster, size or objective that is malformed, unknown or not available."""


class ClusterOptionError(CostError, OptionError):
    """Wrong usage: a cluster's name or number of devices is invalid, or the two disagree."""

    exit_code = OptionError.exit_code
