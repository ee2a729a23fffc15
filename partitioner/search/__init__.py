"""The search over spaces of plans."""
