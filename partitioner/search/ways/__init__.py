"""Ways to run a model: the whole batch, micro-batches, stages, blocks, and one loop over them."""
