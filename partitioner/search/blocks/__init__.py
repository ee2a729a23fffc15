"""Searches of graphs that run partly in blocks, within the memory of their devices."""
