"""Profiling: the seconds of the operators that a search could choose, measured on this machine."""

from partitioner.profiling.profile import Profiled, profile

__all__ = ["Profiled", "profile"]
