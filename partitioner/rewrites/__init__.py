"""Rewrites of graphs: each makes a graph of a graph, before a plan is searched or behind it."""
