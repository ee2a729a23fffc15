"""Profiling: the seconds of the operators that a search could choose, measured on this machine."""

from partitioner.api.profiling.profile import profile
from partitioner.api.profiling.profiled import Profiled

__all__ = ["Profiled", "profile"]
