"""A small Llama written out in primitive operators: no transformers, no torch."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import onnx

from partitioner.examples.builder import Builder, ExampleError, floats

_ROPE_BASE = 10_000.0
_EPSILON = 1e-5


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a Llama; heads x head is hidden, and kv_heads divides heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    batch: int
    seq: int

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ExampleError(
                f"hidden {self.hidden} is not divisible by 2 x heads = {2 * self.heads} "
                "(rotary embeddings turn pairs)"
            )
        if self.heads % self.kv_heads:
            raise ExampleError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def build(
    *,
    layers: int = 2,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    intermediate: int = 688,
    vocab: int = 1024,
    batch: int = 1,
    seq: int = 64,
    seed: int = 0,
) -> onnx.ModelProto:
    """A Llama with random weights: RMSNorm, rotary embeddings, grouped queries, SwiGLU.

    `input_ids` int64 (batch, seq) -> `logits` float32 (batch, seq, vocab).

    Args:
        layers: Decoder blocks.
        hidden: Elements of the residual stream.
        heads: Query heads; hidden / heads must be even.
        kv_heads: Key and value heads; must divide heads.
        intermediate: Elements between the MLP's matrices.
        vocab: Rows of the embedding table.
        batch: Sequences at once.
        seq: Tokens of a sequence.

    Raises:
        ExampleError: The sizes do not divide.
    """
    sizes = _Sizes(layers, hidden, heads, kv_heads, intermediate, batch, seq)
    b = Builder(seed)
    # cos and sin of every position and pair, (seq, head), both halves equal
    pairs = np.arange(0, sizes.head, 2) / sizes.head
    angles = np.outer(np.arange(seq), _ROPE_BASE**-pairs)
    both = np.concatenate([angles, angles], axis=1)
    b.constant("rotary.cos", np.cos(both).astype(np.float32))
    b.constant("rotary.sin", np.sin(both).astype(np.float32))
    # (1, 1, seq, seq): 0 where a token may look, the lowest finite value where not
    ahead = np.triu(np.full((seq, seq), np.finfo(np.float32).min, np.float32), k=1)
    b.constant("causal_mask", ahead[None, None])
    b.weight("model.embed_tokens.weight", vocab, hidden, fan_in=1)
    x = b.op("Gather", "model.embed_tokens.weight", "input_ids", name="embed", axis=0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        normed = _rms_norm(b, sizes, x, f"{prefix}.input_layernorm")
        attended = _attention(b, sizes, normed, f"{prefix}.self_attn")
        x = b.op("Add", x, attended, name=f"{prefix}.residual_attn")
        normed = _rms_norm(b, sizes, x, f"{prefix}.post_attention_layernorm")
        mixed = _swiglu(b, sizes, normed, f"{prefix}.mlp")
        x = b.op("Add", x, mixed, name=f"{prefix}.residual_mlp")
    x = _rms_norm(b, sizes, x, "model.norm")
    b.op("MatMul", x, b.weight("lm_head.weight", hidden, vocab), name="logits")
    ids = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, (batch, seq))
    return b.model("llama", [ids], [floats("logits", batch, seq, vocab)])


def _rms_norm(b: Builder, sizes: _Sizes, x: str, prefix: str) -> str:
    """X / sqrt(mean(x^2) + epsilon) * weight, over the last dim."""
    square = b.op("Mul", x, x, name=f"{prefix}.square")
    mean = b.op("ReduceMean", square, b.ints(-1), name=f"{prefix}.mean", keepdims=1)
    shifted = b.op("Add", mean, b.scalar(_EPSILON), name=f"{prefix}.shifted")
    root = b.op("Sqrt", shifted, name=f"{prefix}.root")
    normed = b.op("Div", x, root, name=f"{prefix}.normed")
    weight = b.near(f"{prefix}.weight", sizes.hidden, centre=1.0)
    return b.op("Mul", normed, weight, name=f"{prefix}.out")


def _attention(b: Builder, sizes: _Sizes, x: str, prefix: str) -> str:
    q = _rotate(b, sizes, _heads(b, sizes, x, f"{prefix}.q", sizes.heads), f"{prefix}.q")
    k = _rotate(b, sizes, _heads(b, sizes, x, f"{prefix}.k", sizes.kv_heads), f"{prefix}.k")
    k = _repeat(b, sizes, k, f"{prefix}.k")
    v = _repeat(b, sizes, _heads(b, sizes, x, f"{prefix}.v", sizes.kv_heads), f"{prefix}.v")
    kt = b.op("Transpose", k, name=f"{prefix}.k.t", perm=[0, 1, 3, 2])
    scores = b.op("MatMul", q, kt, name=f"{prefix}.scores")
    scaled = b.op("Mul", scores, b.scalar(1 / sqrt(sizes.head)), name=f"{prefix}.scaled")
    masked = b.op("Add", scaled, "causal_mask", name=f"{prefix}.masked")
    share = b.op("Softmax", masked, name=f"{prefix}.softmax", axis=-1)
    mixed = b.op("MatMul", share, v, name=f"{prefix}.mixed")
    back = b.op("Transpose", mixed, name=f"{prefix}.back", perm=[0, 2, 1, 3])
    joined = b.op(
        "Reshape", back, b.ints(sizes.batch, sizes.seq, sizes.hidden), name=f"{prefix}.joined"
    )
    weight = _branch_weight(b, sizes, f"{prefix}.o_proj.weight", sizes.hidden)
    return b.op("MatMul", joined, weight, name=f"{prefix}.out")


def _heads(b: Builder, sizes: _Sizes, x: str, prefix: str, heads: int) -> str:
    """Project x and bring it to (batch, heads, seq, head)."""
    weight = b.weight(f"{prefix}_proj.weight", sizes.hidden, heads * sizes.head)
    flat = b.op("MatMul", x, weight, name=f"{prefix}_proj")
    shape = b.ints(sizes.batch, sizes.seq, heads, sizes.head)
    split = b.op("Reshape", flat, shape, name=f"{prefix}.split")
    return b.op("Transpose", split, name=f"{prefix}.heads", perm=[0, 2, 1, 3])


def _rotate(b: Builder, sizes: _Sizes, x: str, prefix: str) -> str:
    """X * cos + (-second half, first half) * sin."""
    half, end, last, one = b.ints(sizes.head // 2), b.ints(sizes.head), b.ints(-1), b.ints(1)
    first = b.op("Slice", x, b.ints(0), half, last, one, name=f"{prefix}.first")
    second = b.op("Slice", x, half, end, last, one, name=f"{prefix}.second")
    negated = b.op("Neg", second, name=f"{prefix}.negated")
    turned = b.op("Concat", negated, first, name=f"{prefix}.turned", axis=-1)
    along = b.op("Mul", x, "rotary.cos", name=f"{prefix}.cos")
    across = b.op("Mul", turned, "rotary.sin", name=f"{prefix}.sin")
    return b.op("Add", along, across, name=f"{prefix}.rotated")


def _repeat(b: Builder, sizes: _Sizes, x: str, prefix: str) -> str:
    """Give every query head its key or value head: (b, kv, s, d) -> (b, heads, s, d)."""
    groups = sizes.heads // sizes.kv_heads
    if groups == 1:
        return x
    grouped = b.ints(sizes.batch, sizes.kv_heads, groups, sizes.seq, sizes.head)
    apart = b.op("Unsqueeze", x, b.ints(2), name=f"{prefix}.apart")
    wide = b.op("Expand", apart, grouped, name=f"{prefix}.wide")
    flat = b.ints(sizes.batch, sizes.heads, sizes.seq, sizes.head)
    return b.op("Reshape", wide, flat, name=f"{prefix}.repeated")


def _swiglu(b: Builder, sizes: _Sizes, x: str, prefix: str) -> str:
    """(silu(x @ gate) * (x @ up)) @ down."""
    inner = sizes.intermediate
    gate_weight = b.weight(f"{prefix}.gate_proj.weight", sizes.hidden, inner)
    up_weight = b.weight(f"{prefix}.up_proj.weight", sizes.hidden, inner)
    gate = b.op("MatMul", x, gate_weight, name=f"{prefix}.gate")
    up = b.op("MatMul", x, up_weight, name=f"{prefix}.up")
    sigmoid = b.op("Sigmoid", gate, name=f"{prefix}.sigmoid")
    silu = b.op("Mul", gate, sigmoid, name=f"{prefix}.silu")
    product = b.op("Mul", silu, up, name=f"{prefix}.product")
    down_weight = _branch_weight(b, sizes, f"{prefix}.down_proj.weight", inner)
    return b.op("MatMul", product, down_weight, name=f"{prefix}.out")


def _branch_weight(b: Builder, sizes: _Sizes, name: str, fan_in: int) -> str:
    """Weight of a residual branch's last matrix, damped so that depth does not grow the sum."""
    return b.weight(name, fan_in, sizes.hidden, gain=1 / sqrt(2 * sizes.layers))
