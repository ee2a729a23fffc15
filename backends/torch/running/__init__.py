"""Runs of ranks: their passes, their steps in stages, all ranks at once, and the rank's module."""
