"""Profiling: the seconds of the operators that a search could choose, measured on this machine."""
