"""Placement of whole nodes on devices, at scale."""
