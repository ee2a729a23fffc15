"""Attention of few queries over many keys, in parts that can be cut along the keys.

A decoder's step has one query, or a few, and a cache of many keys and values. One node of
attention, or of softmax, cannot be cut along the keys: it needs the maximum and the sum over all of
them. Here it is a product, a maximum, the exponentials of the differences, their sum, a product and
a quotient. Each of these has a rule of its own. Where keys are cut, the maximum, the sum and the
product with the values are partial: tensors of the size of the queries are reduced, and the cache
stays where it lies. (This is the online softmax of flash decoding, a part a device.)
"""

from partitioner.rewrites.keys.parts import has_few_queries, keys_in_parts, weighs_values

__all__ = ["has_few_queries", "keys_in_parts", "weighs_values"]
