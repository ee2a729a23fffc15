"""Runs of steps: of one rank with others, or of all ranks in one process."""
