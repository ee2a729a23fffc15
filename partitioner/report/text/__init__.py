"""Plans as text for a terminal."""
