"""The functions that users call, and what they make: compiled models, their runs and checks."""
