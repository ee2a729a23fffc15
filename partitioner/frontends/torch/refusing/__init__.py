"""Refusals of modules whose trace would not be what they do, with their reasons."""
