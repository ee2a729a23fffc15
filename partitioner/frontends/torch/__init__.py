"""PyTorch modules: traced, rewritten, and built into graphs."""
