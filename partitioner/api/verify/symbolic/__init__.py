"""Proof of rank programs without running them: which part of which value each rank holds."""
