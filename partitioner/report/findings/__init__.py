"""Findings on a plan: what limits it, what splitting gains, and what one device would do."""
