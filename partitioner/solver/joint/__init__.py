"""The joint problem: shardings and placements of all nodes at once."""
