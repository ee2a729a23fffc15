"""Kinds of parallelism as constraints on a graph, and what they need to know of it."""
