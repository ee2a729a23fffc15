"""Measurements of ranks: clocks, records of steps, and programs that are timed."""
