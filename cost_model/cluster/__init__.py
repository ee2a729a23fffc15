"""Clusters: devices, the links between them, and the names that users give them."""
