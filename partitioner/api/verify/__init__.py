"""The proof that all ranks together compute what the whole model does."""
