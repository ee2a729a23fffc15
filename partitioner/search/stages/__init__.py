"""Searches of pipelines: stages, their figures, and what they compute again."""
