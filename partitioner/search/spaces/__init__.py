"""Spaces in which every device has a column of its own, as joint problems."""
