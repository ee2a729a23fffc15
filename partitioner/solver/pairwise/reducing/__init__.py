"""Exact reductions of a problem: strategies, nodes and limits that an optimum does without."""
