"""Operators on DTensors that PyTorch (2.13) computes otherwise than on the whole tensor.

This holds on the meshes of ranks' modules: of other DTensors, as those of the user's own modules,
PyTorch refuses what it has no rule for, and to mix them with plain tensors.
"""
