"""Softmax and attention in parts, in ONNX's operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitioner.ir.types import TensorType, numpy_dtype
from partitioner.rewrites.keys.writer import Ops, Writer

ATTENTION, SOFTMAX = "Attention", "Softmax"
#: First opsets in which the axes of ReduceSum, and of ReduceMax, are an operand.
_SUM_AXES_INPUT, _AXES_INPUT = 13, 18


class OnnxWriter(Writer):
    """Nodes of ONNX's operators, in the forms of the graph's opset."""

    ops = Ops("MatMul", "Sub", "Exp", "Div")

    def write(self) -> None:
        """Write the nodes."""
        if self.node.op == SOFTMAX:
            self.softmax(self.node.inputs[0], self.node.outputs[0], may_hide=False)
            return
        query, key, value, mask, past_key, past_value, lengths = _operands(self.node.inputs)
        made, present_key, present_value, _ = (*self.node.outputs, "", "", "")[:4]
        packed = self.type(query).rank == 3
        if packed:
            query = self._by_heads(query, "q_num_heads")
            key, value = (self._by_heads(x, "kv_num_heads") for x in (key, value))
        before = self.type(past_key).shape[2] if past_key else 0
        keys = self._cached(past_key, key, present_key)
        values = self._cached(past_value, value, present_value)
        mask = self._seen(query, keys, mask, before=before, lengths=lengths)
        scale = self.node.attrs.get("scale")
        factor = scale if isinstance(scale, int | float) else self.type(query).shape[-1] ** -0.5
        if not packed:
            self.attention(query, keys, values, mask, scale=float(factor), made=made)
            return
        batch, heads, rows, _ = self.type(query).shape
        width = self.type(values).shape[-1]
        result = TensorType.of(self.type(query).dtype, (batch, heads, rows, width))
        by_head = self.writer.value(f"{self.node.name}/keys/result", result)
        self.attention(query, keys, values, mask, scale=float(factor), made=by_head)
        self.reshaped(self.permuted(by_head, (0, 2, 1, 3)), (batch, rows, heads * width), made)

    def _by_heads(self, x: str, count: str) -> str:
        """``batch position (heads channel) -> batch heads position channel``."""
        batch, rows, width = self.type(x).shape
        heads = self.node.attrs[count]
        assert isinstance(heads, int)
        return self.permuted(self.reshaped(x, (batch, rows, heads, width // heads)), (0, 2, 1, 3))

    def _cached(self, past: str, x: str, present: str) -> str:
        """Past keys or values with those of the step, which may be a result."""
        if not past:
            return self.add("Identity", [x], self.type(x), present) if present else x
        batch, heads, before, width = self.type(past).shape
        joined = (batch, heads, before + self.type(x).shape[2], width)
        result = self.type(x).with_shape(joined)
        return self.add("Concat", [past, x], result, present, axis=2)

    def _seen(self, query: str, keys: str, mask: str, *, before: int, lengths: str) -> str:
        """The mask that hides keys behind a sequence's length, and those that come after a query.

        Queries are the last of the keys: those before them are the past ones or, where lengths are
        given, all others of a sequence.
        """
        rows, count = self.type(query).shape[2], self.type(keys).shape[2]
        is_causal = bool(self.node.attrs.get("is_causal"))
        row = np.arange(rows)[:, None] if is_causal else np.zeros((1, 1), np.int64)
        if lengths:
            batch = self.type(query).shape[0]
            least = np.arange(count) - row + (rows - 1 if is_causal else 0)
            size = self.reshaped(lengths, (batch, 1, 1, 1))
            shape = (batch, 1, *least.shape)
            places = self.constant(least.astype(np.int64))
            seen = self.add("Less", [places, size], TensorType.of("bool", shape))
        elif is_causal and not (flags := np.arange(count) <= row + before).all():
            seen = self.constant(flags)
        else:
            return mask
        if not mask:
            return seen
        of_mask = self.type(mask)
        shape = np.broadcast_shapes(of_mask.shape, self.type(seen).shape)
        if of_mask.dtype == "bool":
            return self.add("And", [mask, seen], TensorType.of("bool", shape))
        hidden = [seen, mask, self._number(-np.inf, mask)]
        return self.add("Where", hidden, TensorType.of(of_mask.dtype, shape))

    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self.add("Mul", [x, self._number(factor, x)], self.type(x))

    def reshaped(self, x: str, shape: Sequence[int], made: str = "") -> str:
        """The elements in another shape."""
        sizes = self.constant(np.array(shape, np.int64))
        return self.add("Reshape", [x, sizes], self.type(x).with_shape(shape), made)

    def permuted(self, x: str, order: Sequence[int]) -> str:
        """The dims in another order."""
        shape = self.type(x).shape
        result = TensorType.of(self.type(x).dtype, [shape[i] for i in order])
        return self.add("Transpose", [x], result, perm=tuple(order))

    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask hides a key.

        A mask of flags hides it where it is false, and one of numbers where it is the lowest of its
        type. The text of the operator says so of minus infinity alone, but ONNX Runtime hides both,
        and exporters write the lowest number.
        """
        nothing, result = self._number(-np.inf, scores), self.type(scores)
        if self.type(mask).dtype == "bool":
            return self.add("Where", [mask, scores, nothing], result)
        lowest = self._number(float(np.finfo(numpy_dtype(self.type(mask).dtype)).min), mask)
        flags = TensorType.of("bool", self.type(mask).shape)
        is_hidden = self.add("LessOrEqual", [mask, lowest], flags)
        mask = self.add("Where", [is_hidden, nothing, mask], self.type(mask))
        return self.add("Add", [scores, mask], result)

    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""
        return self.add("Max", [x, self._number(number, x)], self.type(x))

    def largest(self, x: str) -> str:
        """The maximum over the last dim, which becomes 1."""
        return self._reduced("ReduceMax", x, _AXES_INPUT)

    def total(self, x: str) -> str:
        """The sum over the last dim, which becomes 1."""
        return self._reduced("ReduceSum", x, _SUM_AXES_INPUT)

    def _reduced(self, op: str, x: str, axes_input: int) -> str:
        last = self.type(x).rank - 1
        if self.writer.source.opsets[""] < axes_input:
            return self.add(op, [x], self.reduced(x), axes=(last,), keepdims=1)
        axes = self.constant(np.array([last], np.int64))
        return self.add(op, [x, axes], self.reduced(x), keepdims=1)

    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The value itself: other types keep the operator."""
        assert self.type(x).dtype == dtype
        assert not made
        return x

    def _number(self, number: float, like: str) -> str:
        return self.constant(np.array(number, numpy_dtype(self.type(like).dtype)))


def _operands(inputs: Sequence[str]) -> tuple[str, ...]:
    """Query, key, value, mask, past key, past value and lengths; "" where one is absent."""
    return (*inputs, *[""] * 7)[:7]
