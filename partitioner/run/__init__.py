"""Run rank files: under torchrun (`python -m partitioner.run`), or one local process a rank."""
