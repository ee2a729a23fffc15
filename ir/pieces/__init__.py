"""Pieces of a graph: stretches that run in blocks, repeated layers."""
