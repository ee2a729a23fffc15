"""Measured seconds of operators and communications, and estimates that follow from them."""
