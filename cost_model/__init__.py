"""Clusters, seconds and bytes: what a plan costs, apart from how it was found."""
