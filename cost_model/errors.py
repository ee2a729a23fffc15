"""The folder's exception."""

from partitioner.ir.errors import PartitionerError


class CostError(PartitionerError, ValueError):
    """A cluster, size or objective that cannot be understood or had."""
