"""Patterns of calls in an exported graph, replaced or decomposed into what can be cut."""
