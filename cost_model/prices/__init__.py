"""Seconds of operators, of communications and of reshards."""
