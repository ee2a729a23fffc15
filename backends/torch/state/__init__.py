"""State of a rank's module: its parts of stored values, their contents, and how they are set."""
