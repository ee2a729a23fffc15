"""Bytes of devices along a schedule: of tensors, and of what executors take beside them."""
