"""Writes softmax and attention as nodes that reduce over keys, in the operators of a dialect.

Scores are ``... query key``: queries and keys are the last two dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitioner.ir.types import numpy_dtype
from partitioner.rewrites.keys import aten, onnx
from partitioner.rewrites.keys.naming import WIDE

Writer = aten.AtenWriter | onnx.OnnxWriter


def write(w: Writer) -> None:
    """Write the parts of the node that a writer stands for."""
    node = w.node
    if node.op in w.SOFTMAX:
        _softmax(w, node.inputs[0], node.outputs[0], may_hide=w.SOFTMAX[node.op])
    elif isinstance(w, aten.AtenWriter):
        query, key, value, mask = node.inputs
        _attention(w, query, key, value, mask, made=node.outputs[0])
    else:
        packed = w.type(node.inputs[0]).rank == 3
        query, key, value, mask = w.cached()
        if not packed:
            _attention(w, query, key, value, mask, made=node.outputs[0])
            return
        batch, heads, rows, _ = w.type(query).shape
        width = w.type(value).shape[-1]
        result = w.type(query).with_shape((batch, heads, rows, width))
        by_head = w.writer.value(f"{node.name}/keys/result", result)
        _attention(w, query, key, value, mask, made=by_head)
        w.reshaped(w.permuted(by_head, (0, 2, 1, 3)), (batch, rows, heads * width), node.outputs[0])


def _softmax(w: Writer, scores: str, made: str, *, may_hide: bool) -> None:
    """Write the softmax of scores over their last dim as a value.

    Args:
        w: The writer.
        scores: The scores.
        made: The result, which may be of a wider type.
        may_hide: Rows that see no key have zeros as their softmax; they have NaN otherwise.
    """
    dtype, computed = w.type(made).dtype, _wide(w.type(scores).dtype)
    weights, sums = _weights(w, w.cast(scores, computed), may_hide=may_hide)
    _quotient(w, weights, w.at_least(sums, 1.0) if may_hide else sums, dtype, made)


def _quotient(w: Writer, a: str, b: str, dtype: str, made: str) -> None:
    if dtype == w.type(a).dtype:
        w.add(w.QUOTIENT, [a, b], made=made)
    else:
        w.cast(w.add(w.QUOTIENT, [a, b]), dtype, made)


def _attention(w: Writer, query: str, key: str, value: str, mask: str, *, made: str) -> None:
    """Write attention of operands ``batch heads position channel`` as a value.

    Each head of keys and values serves a group of consecutive heads of queries, which are its
    rows: so the heads of the cache are not copied. Rows that see no key give zeros.

    Args:
        w: The writer.
        query: The queries.
        key: All keys.
        value: All values.
        mask: Broadcasts to (batch, heads, queries, keys); "" for none.
        made: The result, of the type of the queries.
    """
    batch, heads, rows, channels = w.type(query).shape
    dtype, kv = w.type(query).dtype, w.type(key).shape[1]
    scale = w.node.attrs.get("scale")
    factor = float(scale) if isinstance(scale, int | float) else w.default_scale(channels)
    query, key, value = (w.cast(x, _wide(dtype)) for x in (query, key, value))
    by_head, by_kv = (batch, heads, rows), (batch, kv, heads // kv * rows)
    query = _of_rows(w, w.scaled(query, factor), by_kv)
    scores = _product(w, query, w.permuted(key, (0, 1, 3, 2)))
    if mask:
        scores = w.hidden(_of_rows(w, scores, by_head), mask)
    weights, sums = _weights(w, scores, may_hide=bool(mask))
    result = _product(w, _of_rows(w, weights, by_kv), value)
    # behind the product, so that both are there before either is reduced and read
    sums = w.at_least(sums, 1.0) if mask else sums
    result, sums = _of_rows(w, result, by_head), _of_rows(w, sums, by_head)
    _quotient(w, result, sums, dtype, made)


def _weights(w: Writer, scores: str, *, may_hide: bool) -> tuple[str, str]:
    """Exponentials of the scores less their largest, and their sums.

    The largest score of a row that sees a key adds 1 to the sum: a sum below 1 is of a row that
    sees none.
    """
    largest = w.largest(scores)
    if may_hide:
        lowest = np.finfo(numpy_dtype(w.type(scores).dtype)).min
        largest = w.at_least(largest, float(lowest))
    weights = w.add(w.EXPONENTIAL, [w.add(w.DIFFERENCE, [scores, largest])])
    return weights, w.total(weights)


def _product(w: Writer, a: str, b: str) -> str:
    """The product of matrices."""
    return w.add(w.PRODUCT, [a, b], (*w.type(a).shape[:-1], w.type(b).shape[-1]))


def _of_rows(w: Writer, x: str, rows: Sequence[int]) -> str:
    """The tensor with these dims before its last."""
    shape = w.type(x).shape
    return x if shape[:-1] == tuple(rows) else w.reshaped(x, (*rows, shape[-1]))


def _wide(dtype: str) -> str:
    """The element type in which a softmax of scores of this type is computed."""
    return dtype if dtype in WIDE else WIDE[0]
