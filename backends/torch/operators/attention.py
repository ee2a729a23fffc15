"""Scaled dot product attention and its gradients, one node each, the same for every device.

Queries are (batch, heads, rows, d), keys (batch, kv heads, columns, d), values (batch, kv heads,
columns, v); each kv head serves a group of query heads that follow each other. A mask is added to
the scores, or is true where a column may be seen; it broadcasts to the scores. The second result
is the log of the sum of exponentials of each row's scores, from which the gradients are found. In
a row that may see no column both results are 0.
"""

from __future__ import annotations

from typing import Any

import torch

from partitioner.backends.torch.operators.registry import gradient, operator

Tensors = tuple[torch.Tensor, ...]

_SAVED = "Tensor out, Tensor logsumexp"
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? mask"


def _added_mask(query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as numbers of the query's type, with four dims."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype)
        mask = zeros.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype)[(None,) * (4 - mask.dim())]


def _is_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch's fused kernel takes these operands.

    Its CPU kernel only. Other devices take the plain form below, which is right on all of them;
    a fused kernel for them belongs here, tried on such a device.
    """
    return (
        query.device.type == "cpu"
        and query.shape[-1] == value.shape[-1]
        and query.dtype == key.dtype == value.dtype
        and all(x.numel() > 0 and x.stride(-1) == 1 for x in (query, key, value))
    )


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1]) ** -0.5 if scale is None else scale


def _grouped(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Query heads as (kv heads, group), in at least float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    heads = like.shape[1]
    return wide.reshape((x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]))


def _shared(x: torch.Tensor) -> torch.Tensor:
    """Keys or values beside grouped queries."""
    return (x if x.dtype == torch.float64 else x.float()).unsqueeze(2)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """(batch, kv heads, group, rows, columns)."""
    found = _grouped(query, key) @ _shared(key).mT * _scale(query, scale)
    if is_causal:
        seen = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
        found = found.masked_fill(seen.logical_not(), float("-inf"))
    if mask is None:
        return found
    heads = found.flatten(1, 2) + mask
    return heads.view(found.shape)


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - _grouped(logsumexp.unsqueeze(-1), scores))


def _attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - the operator's signature
    value: torch.Tensor,
    mask: torch.Tensor | None,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
) -> Tensors:
    """Strides of PyTorch's kernel: the query's, and rows before heads."""
    batch, heads, rows, depth = query.shape
    if value.shape[-1] == depth:
        out = torch.empty_like(query)
    else:
        out = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
    return out, _logsumexp_like(query)


@operator(
    f"attention({_OPERANDS}, bool is_causal, float? scale) -> (Tensor, Tensor)",
    _attention_fake,
)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensors:
    """(result, log-sum-exp of the scores)."""
    mask = _added_mask(query, mask)
    if _is_fused(query, key, value):
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, logsumexp
    scores = _scores(query, key, mask, is_causal, scale)
    lse = torch.logsumexp(scores, -1).flatten(1, 2)
    lse.masked_fill_(lse == float("-inf"), 0.0)
    result = (_probabilities(scores, lse) @ _shared(value)).flatten(1, 2).to(query.dtype)
    out, logsumexp = _attention_fake(query, key, value, mask, is_causal, scale)
    return out.copy_(result), logsumexp.copy_(lse)


def _logsumexp_like(query: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((batch, rows, heads), dtype=wide).transpose(1, 2)


def _backward_fake(
    grad: torch.Tensor,  # noqa: ARG001 - the operator's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,  # noqa: ARG001
    out: torch.Tensor,  # noqa: ARG001
    logsumexp: torch.Tensor,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
) -> Tensors:
    """Strides of PyTorch's kernel: rows before heads."""
    return tuple(_rows_first(x) for x in (query, key, value))


@operator(
    f"attention_backward(Tensor grad, {_OPERANDS}, {_SAVED}, bool is_causal, float? scale)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_fake,
)
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensors:
    """Gradients of query, key and value."""
    mask = _added_mask(query, mask)
    if _is_fused(query, key, value):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: Tensors = fused(
            *(_dense(grad), query, key, value, out, logsumexp, 0.0, is_causal),
            attn_mask=mask,
            scale=scale,
        )
        return found
    weights, slope = _slope(grad, query, key, value, mask, out, logsumexp, is_causal, scale)
    factor = _scale(query, scale)
    found = (
        (slope @ _shared(key) * factor).flatten(1, 2),
        (slope.mT @ _grouped(query, key) * factor).sum(2),
        (weights.mT @ _grouped(grad, key)).sum(2),
    )
    empty = _backward_fake(grad, query, key, value, mask, out, logsumexp, is_causal, scale)
    return tuple(own.copy_(x) for own, x in zip(empty, found, strict=True))


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """The kernel reads channels that lie side by side."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _slope(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, gradient of the scaled and masked scores)."""
    weights = _probabilities(_scores(query, key, mask, is_causal, scale), logsumexp)
    g = _grouped(grad, key)
    rows = (g * _grouped(out, key)).sum(-1, keepdim=True)
    return weights, weights * (g @ _shared(value).mT - rows)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, depth = x.shape
    return x.new_empty((batch, rows, heads, depth)).transpose(1, 2)


def _mask_fake(
    grad: torch.Tensor,  # noqa: ARG001 - the operator's signature
    query: torch.Tensor,  # noqa: ARG001
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,  # noqa: ARG001
    mask: torch.Tensor,
    out: torch.Tensor,  # noqa: ARG001
    logsumexp: torch.Tensor,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
) -> torch.Tensor:
    return torch.empty_like(mask, memory_format=torch.contiguous_format)


@operator(
    "attention_mask_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor mask, "
    f"{_SAVED}, float? scale) -> Tensor",
    _mask_fake,
)
def attention_mask_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Gradient of a mask of numbers (a learned bias)."""
    added = _added_mask(query, mask)
    _, slope = _slope(grad, query, key, value, added, out, logsumexp, False, scale)
    return slope.flatten(1, 2).sum_to_size(mask.shape).to(mask.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    own = torch.ops.partitioner
    found = own.attention_backward(
        *(grad, query, key, value, mask, out, logsumexp, ctx.is_causal, ctx.scale)
    )
    bias = (
        own.attention_mask_backward(grad, query, key, value, mask, out, logsumexp, ctx.scale)
        if ctx.needs_input_grad[3]
        else None
    )
    return (*found, bias, None, None)


gradient("attention", _gradient, _save)
