"""Exact simplifications of a problem, of which each keeps at least one best plan."""
