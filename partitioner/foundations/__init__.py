"""Foundations of all folders: files, texts of numbers, streams, a pause of the collector."""
