"""The nodes of softmax and attention in parts, in ONNX's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from partitioner.ir.types import numpy_dtype
from partitioner.rewrites.node_writer import KeysWriter, PartWriter

ATTENTION = "Attention"


class OnnxWriter(KeysWriter, PartWriter):
    """Nodes of ONNX's operators, in the forms of the graph's opset."""

    PRODUCT, DIFFERENCE, EXPONENTIAL, QUOTIENT = "MatMul", "Sub", "Exp", "Div"
    LARGEST, TOTAL = "ReduceMax", "ReduceSum"
    SOFTMAX: ClassVar = {"Softmax": False}

    def cached(self) -> tuple[str, str, str, str]:
        """The queries, all keys and values by heads, and the mask."""
        operands = (*self.node.inputs, *[""] * 7)[:7]
        query, key, value, mask, past_key, past_value, lengths = operands
        if self.type(query).rank == 3:
            query = self._by_heads(query, "q_num_heads")
            key, value = (self._by_heads(x, "kv_num_heads") for x in (key, value))
        _, present_key, present_value = (*self.node.outputs, "", "")[:3]
        before = self.type(past_key).shape[2] if past_key else 0
        keys = self._joined(past_key, key, present_key)
        values = self._joined(past_value, value, present_value)
        return query, keys, values, self._seen(query, keys, mask, before=before, lengths=lengths)

    def _by_heads(self, x: str, count: str) -> str:
        """``batch position (heads channel) -> batch heads position channel``."""
        batch, rows, width = self.type(x).shape
        heads = self.node.attrs[count]
        assert isinstance(heads, int)
        return self.permuted(self.reshaped(x, (batch, rows, heads, width // heads)), (0, 2, 1, 3))

    def _joined(self, past: str, x: str, present: str) -> str:
        """Past keys or values with those of the step, which may be a result."""
        if not past:
            return self.add("Identity", [x], made=present) if present else x
        batch, heads, before, width = self.type(past).shape
        shape = (batch, heads, before + self.type(x).shape[2], width)
        return self.add("Concat", [past, x], shape, present, attrs={"axis": 2})

    def _seen(self, query: str, keys: str, mask: str, *, before: int, lengths: str) -> str:
        """The mask that hides keys behind a sequence's length, and those that come after a query.

        Queries are the last of the keys: those before them are the past ones or, where lengths are
        given, all others of a sequence.
        """
        rows, count = self.type(query).shape[2], self.type(keys).shape[2]
        is_causal = bool(self.node.attrs.get("is_causal"))
        row = np.arange(rows)[:, None] if is_causal else np.zeros((1, 1), np.int64)
        if lengths:
            least = np.arange(count) - row + (rows - 1 if is_causal else 0)
            size = self.reshaped(lengths, (self.type(query).shape[0], 1, 1, 1))
            places = self.constant("places", least.astype(np.int64))
            seen = self.add("Less", [places, size], dtype="bool")
        elif is_causal and not (flags := np.arange(count) <= row + before).all():
            seen = self.constant("seen", flags)
        else:
            return mask
        if not mask:
            return seen
        if self.type(mask).dtype == "bool":
            return self.add("And", [mask, seen])
        return self.add("Where", [seen, mask, self.number("hidden", -np.inf, mask)])

    def default_scale(self, channels: int) -> float:
        """The factor of scores that the node does not state."""
        return float(channels**-0.5)

    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self.add("Mul", [x, self.number("factor", factor, x)])

    def permuted(self, x: str, order: Sequence[int]) -> str:
        """The dims in another order."""
        shape = [self.type(x).shape[i] for i in order]
        return self.add("Transpose", [x], shape, attrs={"perm": tuple(order)})

    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask hides a key.

        A mask of flags hides it where it is false, and one of numbers where it is the lowest of its
        type. The text of the operator says so of minus infinity alone, but ONNX Runtime hides both,
        and exporters write the lowest number.
        """
        nothing, shape = self.number("hidden", -np.inf, scores), self.type(scores).shape
        if self.type(mask).dtype == "bool":
            return self.add("Where", [mask, scores, nothing], shape)
        least = float(np.finfo(numpy_dtype(self.type(mask).dtype)).min)
        lowest = self.number("lowest", least, mask)
        is_hidden = self.add("LessOrEqual", [mask, lowest], dtype="bool")
        mask = self.add("Where", [is_hidden, nothing, mask])
        return self.add("Add", [scores, mask], shape)

    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""
        return self.add("Max", [x, self.number("least", number, x)])

    def over_keys(self, op: str, x: str) -> str:
        """A reduction over the last dim, which becomes 1."""
        return self.reduced(op, x, [self.type(x).rank - 1])

    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The value itself: other types keep the operator."""
        assert self.type(x).dtype == dtype
        assert not made
        return x
