"""Graphs of the IR, built from the calls of a trace."""
