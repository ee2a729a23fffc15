"""Rewrites of graphs: each makes a graph of a graph, or proves that one may be made."""
