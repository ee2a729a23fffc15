"""Strategies of nodes: cuts of their factors on device groups, and constraints on them."""
