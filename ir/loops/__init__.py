"""Loops of operators: factors, and dims that follow from them by windows, parts and dispatch."""
