"""Graphs of a rank's program: its steps as calls, its communications as collectives, its passes."""
