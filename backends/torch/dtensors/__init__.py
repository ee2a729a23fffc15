"""Tensors that ranks have in parts, and steps of optimizers over them."""
