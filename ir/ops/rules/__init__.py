"""Builders of factor rules, which the tables of ONNX and of PyTorch share.

A builder sees the types of a node's operands and results, not its attributes: those a table reads,
and gives as plain arguments.
"""
