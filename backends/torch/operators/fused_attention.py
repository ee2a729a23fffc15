"""PyTorch's fused kernels of scaled dot product attention, by device and operands.

A kernel gives the result and the log of the sum of exponentials of each row's scores, and takes
both for the gradients. Shapes are those of `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import pad

aten = torch.ops.aten

#: What the flash kernel's depth is a multiple of: PyTorch pads others above the operator.
_FLASH_DEPTH = 8
#: Rows of a log-sum-exp that the memory-efficient kernel reads at once.
_ALIGNED_ROWS = 32


@dataclass(frozen=True)
class Call:
    """Operands and settings of an attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def added_mask(self) -> Tensor | None:
        """The mask as numbers of the query's type, with four dims."""
        mask, dtype = self.mask, self.query.dtype
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            zeros = torch.zeros_like(mask, dtype=dtype)
            mask = zeros.masked_fill_(mask.logical_not(), float("-inf"))
        return mask.to(dtype)[(None,) * (4 - mask.dim())]


class Kernel(NamedTuple):
    """A kernel: `forward(call)` and `backward(call, grad, out, logsumexp)`.

    The result has the strides of a dense query, the log-sum-exp has its rows before its heads.
    """

    forward: Callable[[Call], tuple[Tensor, Tensor]]
    backward: Callable[[Call, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def kernel_for(call: Call) -> Kernel | None:
    """The fused kernel that takes a call; None if there is none.

    On a GPU no call with a mask is taken: a row that may see no column has no numbers there. Nor is
    one whose scale is not positive: the kernels look for a row's largest score before they scale.
    """
    query, key, value = call.query, call.key, call.value
    dense = all(x.numel() > 0 and x.stride(-1) == 1 for x in (query, key, value))
    if not dense or query.shape[-1] != value.shape[-1]:
        return None
    if not query.dtype == key.dtype == value.dtype:
        return None
    if query.device.type == "cpu":
        return _ON_CPU
    is_square = query.shape[2] == key.shape[2]
    if query.device.type != "cuda" or call.mask is not None or (call.is_causal and not is_square):
        return None
    if call.scale is not None and call.scale <= 0:
        return None
    # What a kernel takes does not depend on the number of heads; so none is copied to ask for it.
    heads = key.shape[1]
    some = query if query.shape[1] == heads else query[:, :heads]
    asked = SDPAParams(some, key, value, None, 0.0, call.is_causal, False)
    if can_use_flash_attention(asked) and query.shape[-1] % _FLASH_DEPTH == 0:
        return _FLASH
    return _EFFICIENT if can_use_efficient_attention(asked) else None


def _cpu_forward(call: Call) -> tuple[Tensor, Tensor]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        call.query,
        call.key,
        call.value,
        0.0,
        call.is_causal,
        attn_mask=call.added_mask,
        scale=call.scale,
    )
    return out, logsumexp


def _cpu_backward(call: Call, grad: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    # the kernel reads channels that lie side by side
    grad, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, out))
    gradients: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        call.query,
        call.key,
        call.value,
        out,
        logsumexp,
        0.0,
        call.is_causal,
        attn_mask=call.added_mask,
        scale=call.scale,
    )
    return gradients


def _flash_forward(call: Call) -> tuple[Tensor, Tensor]:
    key, value = _by_query(call)
    out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
        call.query, key, value, 0.0, call.is_causal, scale=call.scale
    )
    return _in_order(call, out, logsumexp)


def _flash_backward(call: Call, grad: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, ...]:
    key, value = _by_query(call)
    no_dropout = _no_dropout(call.query)
    query, key_grad, value_grad = aten._scaled_dot_product_flash_attention_backward(
        grad.contiguous(),
        call.query,
        key,
        value,
        out,
        logsumexp.contiguous(),
        None,
        None,
        call.query.shape[2],
        key.shape[2],
        0.0,
        call.is_causal,
        no_dropout,
        no_dropout,
        scale=call.scale,
    )
    return query, _by_key(call, key_grad), _by_key(call, value_grad)


def _efficient_forward(call: Call) -> tuple[Tensor, Tensor]:
    key, value = _by_query(call)
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        call.query, key, value, None, True, 0.0, call.is_causal, scale=call.scale
    )
    return _in_order(call, out, logsumexp[:, :, : call.query.shape[2]])


def _efficient_backward(
    call: Call, grad: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    key, value = _by_query(call)
    no_dropout = _no_dropout(call.query)
    more = -call.query.shape[2] % _ALIGNED_ROWS
    aligned = pad(logsumexp.contiguous(), (0, more), value=float("inf"))
    query, key_grad, value_grad, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad.contiguous(),
        call.query,
        key,
        value,
        None,
        out,
        aligned,
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        call.is_causal,
        scale=call.scale,
    )
    return query, _by_key(call, key_grad), _by_key(call, value_grad)


_ON_CPU = Kernel(_cpu_forward, _cpu_backward)
_FLASH = Kernel(_flash_forward, _flash_backward)
_EFFICIENT = Kernel(_efficient_forward, _efficient_backward)


def _in_order(call: Call, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Results of a kernel with the strides that those of all kernels have."""
    like = torch.empty_like(call.query, device="meta").stride()
    if out.stride() != like:
        out = torch.empty_like(call.query).copy_(out)
    return out, logsumexp.transpose(1, 2).contiguous().transpose(1, 2)


def _no_dropout(query: Tensor) -> Tensor:
    """The state of a random generator that nothing is drawn from."""
    return torch.zeros((), dtype=torch.int64, device=query.device)


def _by_query(call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values, each head once for each query head that it serves."""
    group = call.query.shape[1] // call.key.shape[1]
    if group == 1:
        return call.key, call.value
    return call.key.repeat_interleave(group, 1), call.value.repeat_interleave(group, 1)


def _by_key(call: Call, gradient: Tensor) -> Tensor:
    """The gradient of keys or values, by that of what `_by_query` gave."""
    heads = call.key.shape[1]
    if gradient.shape[1] == heads:
        return gradient
    return gradient.view(gradient.shape[0], heads, -1, *gradient.shape[2:]).sum(2)
