"""Clusters, seconds and bytes: the cost of a plan, apart from the search for it."""
