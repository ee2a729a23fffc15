"""Compiled models: run, verify, save, load."""
