"""Moves from one choice to a better one, within the limit on memory."""
