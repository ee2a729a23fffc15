"""Findings on a plan: what limits it, what splitting gains, what its figures leave out."""
