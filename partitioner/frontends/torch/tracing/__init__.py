"""Traces of a PyTorch module: captured, differentiated, and extended by repeated layers."""
