"""Communication for models split by hand: `partitioner.functional`, `partitioner.Chain`."""
