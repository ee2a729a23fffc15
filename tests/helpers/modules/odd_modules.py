"""Small modules of rare kinds: containers, parametrizations, structures, layouts, element types.

    python tests/helpers/modules/odd_modules.py [NAME ...]

prints a line a module and number of devices: "equal", or how it is refused.
"""

from __future__ import annotations

import collections
import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

import partitioner
from partitioner.frontends.torch.exporting import replaced
from partitioner.ir.errors import PartitionerError

#: A module and its arguments: a tuple, or a dict of keywords.
Made = tuple[nn.Module, Any]


class Odd(nn.Module):
    """Parts, and a function that computes with them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Trained(nn.Module):
    """The mean square of a module's floating results, then these."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        results = self.inner(*args, **kwargs)
        loss = torch.zeros((), dtype=torch.float64)
        for one in pytree.tree_leaves(results):
            if isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()):
                size = one.abs() if one.is_complex() else one
                loss = loss + size.square().sum() / max(1, one.numel())
        return loss, results


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Fields:
    main: Tensor
    mask: Tensor | None = None


torch.export.register_dataclass(Fields, serialized_type_name="odd_modules.Fields")


class Scaled(nn.Module):
    """Its weight is a property of another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(randn(6, 8))

    @property
    def weight(self) -> Tensor:
        return self.raw.exp().softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Counter(nn.Module):
    """An integer buffer that a call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x) * self.calls
        return y if self.none is None else y + self.none


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LazyLinear(6), nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x))
        return y


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def odd(run: Callable[..., Any], *args: Any, **parts: Any) -> Callable[[], Made]:
    return lambda: (Odd(run, **copy.deepcopy(parts)), copy.deepcopy(args))


def layer(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Made]:
    return lambda: (make(), (randn(*shape),))


def initialised(module: nn.Module, *args: Any) -> nn.Module:
    module.double()(*args)
    return module


def listed(m: Any, x: Tensor) -> Tensor:
    for weight in m.weights:
        x = (x @ weight).tanh()
    return x


def keyed(m: Any, x: Tensor) -> dict[str, Any]:
    y = x @ m.weights["first"]
    return {"sum": y + m.weights["second"], "choice": m.layers["b"](y), "none": None, "n": 3}


def in_place_inputs(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2).add_(1)
    y[1:3] = m.layer(y[1:3].clone())
    y[:, 0].clamp_(-1)
    return y


def shared(m: Any, x: Tensor) -> Tensor:
    return m.layers[1](m.layers[0](x).relu()) + m.alias(x)


def complex_weights(m: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=-1) * torch.view_as_complex(m.weight), n=8, dim=-1)


def views_of_parameters(m: Any, x: Tensor) -> Tensor:
    first, second = m.weight.split(4, 1)
    return x[:, :4] @ first.T + x[:, 4:] @ m.weight.unfold(1, 4, 4)[:, 1].T + second.sum()


def attended(m: Any, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    y: tuple[Tensor, Tensor] = m.attention(
        x, x, x, attn_mask=causal, key_padding_mask=hidden, average_attn_weights=False
    )
    return y


def sampled(m: Any, x: Tensor) -> Tensor:
    grid = F.affine_grid(m.layer(x.mean((2, 3))).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def unfolded(m: Any, x: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1, stride=2)
    return F.fold(m.layer(columns.mT).mT, (8, 8), 3, padding=1, stride=2)


def losses(m: Any, x: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
    scores = m.layer(x)
    weight = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
    sign = (classes % 2) * 2 - 1
    return (
        F.cross_entropy(scores, classes, weight=weight, ignore_index=2, label_smoothing=0.1),
        F.cross_entropy(scores, classes, reduction="none", weight=weight),
        F.cross_entropy(scores, scores.detach().softmax(1)),
        F.nll_loss(scores.log_softmax(1), classes, weight=weight, reduction="sum", ignore_index=1),
        F.multi_margin_loss(scores, classes, weight=weight),
        F.cosine_embedding_loss(scores, scores.roll(1, 0), sign, margin=0.2),
        F.margin_ranking_loss(scores[:, 0], scores[:, 1], sign, margin=0.1, reduction="none"),
        F.triplet_margin_loss(scores, scores.roll(1, 0), scores.roll(2, 0), swap=True),
        F.kl_div(scores.log_softmax(1), x[:, :6].log_softmax(1), log_target=True),
        F.huber_loss(scores, x[:, :6], reduction="none", delta=0.3),
        F.poisson_nll_loss(scores, x[:, :6].abs(), full=True),
        F.hinge_embedding_loss(scores, sign[:, None].expand(-1, 6), margin=0.5),
        F.binary_cross_entropy_with_logits(scores, x[:, :6].sigmoid(), pos_weight=weight),
        F.multilabel_soft_margin_loss(scores, (x[:, :6] > 0).double(), weight=weight),
    )


def ctc(m: Any, x: Tensor, labels: Tensor) -> Tensor:
    scores = m.layer(x).log_softmax(-1)
    return F.ctc_loss(scores, labels, (7, 6, 7), (2, 3, 1), zero_infinity=True)


def distances(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m.layer(x)
    return (
        torch.cdist(y, y.roll(1, 0) + 3),
        torch.cdist(y, x[:, :6], p=1.0),
        F.pairwise_distance(y, x[:, :6]),
        F.cosine_similarity(y[:, None], x[None, :, :6], -1),
        F.pdist(y + torch.arange(4.0, dtype=torch.float64)[:, None]),
    )


def powers(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = torch.fft.fft2(m.layer(x).view(4, 2, 3))
    return y.abs(), torch.view_as_real(torch.fft.ifftshift(y)), torch.fft.hfft(y, n=4)


def resized(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = m.layer(x)
    return (
        F.interpolate(y, size=(9, 5), mode="bicubic", align_corners=True),
        F.interpolate(y, scale_factor=1.5, mode="bilinear", antialias=True),
        F.interpolate(y, scale_factor=0.5, mode="area"),
        F.interpolate(y, size=(7, 9), mode="nearest-exact"),
        F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2),
        F.pad(y, (1, 2, 0, 1), mode="reflect") + F.pad(y, (2, 1, 1, 0), mode="circular"),
        F.lp_pool2d(y.abs() + 0.1, 2.0, 3, stride=2),
        F.adaptive_max_pool2d(y, (3, 2)),
        F.max_pool2d(y, 3, stride=2, padding=1, dilation=1, ceil_mode=True),
        F.avg_pool2d(y, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        F.channel_shuffle(y, 2),
        F.local_response_norm(y, 3),
    )


def chosen(m: Any, x: Tensor, flag: bool, times: int, mask: Tensor, extra: Tensor | None) -> Tensor:
    y: Tensor = m.layer(x)
    for _ in range(times):
        y = y.tanh() if flag else y.sin()
    return torch.where(mask, y, 0.0) if extra is None else y + extra


def nested(m: Any, tree: Any) -> Any:
    y = m.layer(tree["a"][0]) + tree["b"][1]["c"]
    return [(y, {"deep": (y.sin(), [y.cos()])}), None, "text"]


def fields(m: Any, value: Fields) -> Fields:
    y = m.layer(value.main)
    return Fields(y if value.mask is None else y * value.mask, y.mean(0))


def ordered(m: Any, x: Tensor) -> Any:
    y = m.layer(x)
    return collections.OrderedDict(left=Pair(y, y.neg()), right=[y.abs()])


def attribute_set(m: Any, x: Tensor) -> Tensor:
    m.dims = x.dim()
    m.last = 0
    m.last = m.dims
    y: Tensor = m.layer(x) * m.last
    return y


def frozen_written(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    m.count.add_(1)
    return (y - m.mean) * m.count


def by_keywords(m: Any, x: Tensor) -> Tensor:
    y = m.layers["class"](m.layers["in"](x)) * m.weights["lambda"]
    return y + getattr(m, "if") + getattr(m, "None")[0]


def marked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Attention whose mask is indexed by counts, as libraries do."""
    rows, keys = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    seen = mask.bool()[rows[:, None, None, None], keys[None, None, None, :]]
    q, k, v = (one.unsqueeze(1) for one in m.layer(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(-1, 1, 5, -1))


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def tied() -> Made:
    words, scores = nn.Embedding(9, 8), nn.Linear(8, 9)
    scores.weight = words.weight
    module = Odd(lambda m, i: m.scores(m.words(i).relu()), words=words, scores=scores)
    return module, (torch.randint(0, 9, (4, 3)),)


def linear(out: int = 6) -> nn.Linear:
    return nn.Linear(8, out)


def same_layer() -> Made:
    one = nn.Linear(8, 8)
    return Odd(shared, layers=nn.ModuleList([one, nn.Linear(8, 8)]), alias=one), (randn(4, 8),)


def oblique() -> Made:
    """Weights that do not lie in rows: transposed, expanded in memory, channels last."""
    convolution = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    turned = nn.Parameter(randn(8, 6).T)
    holed = nn.Parameter(randn(6, 16)[:, ::2])
    module = Odd(
        lambda m, x, y: (m.convolution(x), y @ m.turned.T + y @ m.holed.T),
        convolution=convolution,
        turned=turned,
        holed=holed,
    )
    return module, (
        randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last),
        randn(8, 4).T,
    )


def transformer() -> Made:
    return nn.Transformer(
        8, 2, 1, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    ), {"src": randn(2, 5, 8), "tgt": randn(2, 3, 8), "tgt_is_causal": False}


def encoder() -> Made:
    one = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(one, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    return module, {"src": randn(2, 5, 8), "src_key_padding_mask": torch.arange(10).view(2, 5) > 7}


def parametrized() -> Made:
    module = nn.Linear(8, 8)
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module, (randn(4, 8),)


MODULES: Mapping[str, Callable[[], Made]] = {
    "ParameterList": odd(
        listed, randn(4, 8), weights=nn.ParameterList([randn(8, 8), randn(8, 6), randn(6, 4)])
    ),
    "ParameterDict, ModuleDict": odd(
        keyed,
        randn(4, 8),
        weights=nn.ParameterDict({"first": randn(8, 6), "second": randn(6)}),
        layers=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(6, 3)}),
    ),
    "Sequential of Sequentials": layer(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 6)), nn.Identity(), nn.Sequential()), 4, 8
    ),
    "old weight_norm": layer(lambda: nn.utils.weight_norm(nn.Linear(8, 6)), 4, 8),
    "weight_norm": layer(lambda: parametrizations.weight_norm(nn.Conv1d(8, 6, 3), dim=1), 2, 8, 7),
    "spectral_norm": layer(lambda: parametrizations.spectral_norm(nn.Linear(8, 6)), 4, 8),
    "orthogonal": layer(lambda: parametrizations.orthogonal(nn.Linear(8, 6)), 4, 8),
    "parametrization": parametrized,
    "property": layer(Scaled, 4, 8),
    "nested inputs": lambda: (
        Odd(nested, layer=linear()),
        ({"a": (randn(4, 8), None), "b": [1, {"c": randn(6)}]},),
    ),
    "dataclass": lambda: (Odd(fields, layer=linear()), (Fields(randn(4, 8), randn(6)),)),
    "dataclass with None": lambda: (Odd(fields, layer=linear()), (Fields(randn(4, 8)),)),
    "OrderedDict, NamedTuple": odd(ordered, randn(4, 8), layer=linear()),
    "keywords": lambda: (
        Odd(lambda m, *, x, scale=2.0: m.layer(x) * scale, layer=linear()),
        {"x": randn(4, 8), "scale": 0.5},
    ),
    "bool, int, None": odd(
        chosen, randn(4, 8), True, 2, torch.arange(24).view(4, 6) % 3 > 0, None, layer=linear()
    ),
    "integers alone": lambda: (
        Odd(lambda m, i: m.table(i).sum(1) * i.sum(1, keepdim=True), table=nn.Embedding(9, 6)),
        (torch.randint(0, 9, (4, 3)),),
    ),
    "integer buffer": layer(Counter, 4, 8),
    "in-place on a copy": odd(in_place_inputs, randn(5, 8), layer=nn.Linear(8, 8)),
    "views of parameters": odd(views_of_parameters, randn(4, 8), weight=nn.Parameter(randn(6, 8))),
    "oblique weights": oblique,
    "expanded input": lambda: (
        Odd(lambda m, x: m.layer(x), layer=linear()),
        (randn(8).expand(4, 8),),
    ),
    "flipped input": lambda: (Odd(lambda m, x: m.layer(x), layer=linear()), (randn(8, 4).T,)),
    "0-dim input": lambda: (
        Odd(lambda m, x, t: m.layer(x) * t + t.exp(), layer=linear()),
        (randn(4, 8), torch.tensor(0.3, dtype=torch.float64)),
    ),
    "empty batch": odd(lambda m, x: m.layer(x), randn(0, 8), layer=linear()),
    "one row": odd(lambda m, x: m.layer(x), randn(1, 8), layer=linear()),
    "shared submodules": same_layer,
    "lazy": lambda: (initialised(Lazy(), randn(4, 8)), (randn(4, 8),)),
    "0-dim and one-element parameters": odd(
        lambda m, x: m.layer(x) * m.scale + m.shift,
        randn(4, 8),
        layer=linear(),
        scale=nn.Parameter(torch.tensor(2.0)),
        shift=nn.Parameter(torch.ones(1)),
    ),
    "complex weights": odd(complex_weights, randn(4, 8), weight=nn.Parameter(randn(5, 2))),
    "complex parameter": odd(
        lambda m, x: (x.to(torch.complex128) @ m.weight).abs(),
        randn(4, 8),
        weight=nn.Parameter(torch.view_as_complex(randn(8, 6, 2))),
    ),
    "fft": odd(powers, randn(4, 8), layer=linear()),
    "distances": odd(distances, randn(4, 8), layer=linear()),
    "Bilinear": lambda: (nn.Bilinear(8, 6, 5), (randn(4, 8), randn(4, 6))),
    "EmbeddingBag, offsets": lambda: (
        nn.EmbeddingBag(9, 6, mode="mean", padding_idx=2, include_last_offset=True),
        (torch.randint(0, 9, (12,)), torch.tensor([0, 4, 4, 9, 12])),
    ),
    "EmbeddingBag, weights": lambda: (
        nn.EmbeddingBag(9, 6, mode="sum"),
        {
            "input": torch.randint(0, 9, (4, 3)),
            "per_sample_weights": randn(4, 3),
        },
    ),
    "Embedding, padding": lambda: (
        nn.Embedding(9, 6, padding_idx=0),
        (torch.arange(8).view(2, 4),),
    ),
    "MultiheadAttention": lambda: (
        Odd(attended, attention=nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)),
        (
            randn(3, 6, 8),
            torch.zeros(3, 6, dtype=torch.bool).index_fill(1, torch.tensor([5]), True),
        ),
    ),
    "attention of other sizes": lambda: (
        nn.MultiheadAttention(8, 2, kdim=6, vdim=4, bias=False, add_zero_attn=True),
        (randn(5, 3, 8), randn(7, 3, 6), randn(7, 3, 4)),
    ),
    "Transformer": transformer,
    "TransformerEncoder, padding": encoder,
    "LSTM": layer(lambda: nn.LSTM(8, 6, 2, bidirectional=True, proj_size=3), 4, 3, 8),
    "GRU": layer(
        lambda: nn.GRU(8, 6, 2, bidirectional=True, batch_first=True, bias=False), 3, 4, 8
    ),
    "RNN with a state": lambda: (
        nn.RNN(8, 6, nonlinearity="relu"),
        (randn(4, 3, 8), randn(1, 3, 6)),
    ),
    "resizing": odd(resized, randn(2, 4, 8, 8), layer=nn.Conv2d(4, 4, 1)),
    "grid_sample": odd(sampled, randn(3, 4, 6, 5), layer=nn.Linear(4, 6)),
    "unfold and fold": odd(unfolded, randn(2, 3, 8, 8), layer=nn.Linear(27, 18)),
    "Conv3d": layer(
        lambda: nn.Conv3d(4, 6, (3, 1, 2), stride=(2, 1, 1), padding=(1, 0, 2), groups=2),
        2,
        4,
        5,
        4,
        3,
    ),
    "Conv2d, odd padding": layer(
        lambda: nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="replicate", dilation=2),
        2,
        4,
        7,
        6,
    ),
    "ConvTranspose1d": layer(
        lambda: nn.ConvTranspose1d(6, 4, 3, stride=3, padding=1, output_padding=2, groups=2),
        2,
        6,
        5,
    ),
    "ConvTranspose3d": layer(lambda: nn.ConvTranspose3d(4, 6, 2, dilation=2), 2, 4, 3, 3, 3),
    "GroupNorm": layer(lambda: nn.Sequential(nn.Conv1d(6, 6, 1), nn.GroupNorm(3, 6)), 4, 6, 5),
    "InstanceNorm": layer(
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), 4, 6, 5, 3
    ),
    "BatchNorm, no momentum": layer(lambda: nn.BatchNorm2d(6, momentum=None), 4, 6, 5, 3),
    "RMSNorm, LayerNorm": layer(
        lambda: nn.Sequential(nn.RMSNorm((3, 8)), nn.LayerNorm((3, 8), bias=False)), 4, 3, 8
    ),
    "losses": lambda: (
        Odd(losses, layer=linear()),
        (randn(6, 8), torch.tensor([0, 5, 2, 3, 1, 4])),
    ),
    "CTC": lambda: (
        Odd(ctc, layer=nn.Linear(8, 5)),
        (randn(7, 3, 8), torch.tensor([[1, 2, 0], [3, 4, 1], [2, 0, 0]])),
    ),
    "CTC, sizes as tensors": lambda: (
        Odd(
            lambda m, x, labels, sizes: F.ctc_loss(m.layer(x), labels, *sizes),
            layer=nn.Linear(8, 5),
        ),
        (randn(7, 3, 8), torch.ones(3, 3, dtype=torch.long), torch.tensor([[7, 6, 7], [2, 3, 1]])),
    ),
    "gaussian_nll_loss": odd(
        lambda m, x: F.gaussian_nll_loss(m.layer(x), x[:, :6], x[:, :6].square() + 1),
        randn(4, 8),
        layer=linear(),
    ),
    "angle": odd(
        lambda m, x: torch.view_as_complex(m.layer(x).view(4, 3, 2)).angle(),
        randn(4, 8),
        layer=linear(),
    ),
    "AdaptiveLogSoftmax": lambda: (
        nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]),
        (randn(6, 8), torch.tensor([0, 3, 5, 7, 9, 11])),
    ),
    "activations": odd(
        lambda m, x: (m.prelu(x), F.glu(x), F.hardswish(x), F.logsigmoid(x), F.mish(x)),
        randn(4, 8),
        prelu=nn.PReLU(8),
    ),
    "tied": tied,
    "attribute set in forward": odd(attribute_set, randn(4, 8), layer=linear(), dims=0, last=0),
    "frozen parameters written": odd(
        frozen_written, randn(4, 8), layer=linear(), mean=frozen(randn(6)), count=frozen(randn())
    ),
    "keywords as names": odd(
        by_keywords,
        randn(4, 8),
        layers=nn.ModuleDict({"in": nn.Linear(8, 8), "class": linear()}),
        weights=nn.ParameterDict({"lambda": randn(6)}),
        **{"if": randn(6), "None": nn.ParameterList([randn(6)])},
    ),
    "one output": layer(lambda: nn.Linear(8, 1), 4, 8),
    "no elements": odd(
        lambda m, x: torch.cat([m.layer(x), m.rows]) + m.none.sum(),
        randn(4, 8),
        layer=linear(),
        rows=nn.Parameter(randn(0, 6)),
        none=nn.Parameter(randn(0)),
    ),
    "mask indexed by counts": lambda: (
        Odd(marked, layer=nn.Linear(8, 24)),
        (randn(4, 5, 8), torch.arange(20).view(4, 5) % 6),
    ),
    "SyncBatchNorm": layer(lambda: nn.SyncBatchNorm(6), 4, 6, 5),
    "unregistered parameters": lambda: (
        Odd(
            lambda m, x: m.layer(x) @ m.hidden[0],
            layer=linear(),
            hidden=(nn.Parameter(randn(6, 6)),),
        ),
        (randn(4, 8),),
    ),
}


def made(name: str) -> Made:
    """The same each time."""
    torch.manual_seed(0)
    module, arguments = MODULES[name]()
    return Trained(module.double()), arguments


#: How modules are refused, by name.
REFUSED = {
    "BatchNorm, no momentum": "inner is a BatchNorm2d with momentum=None",
    "AdaptiveLogSoftmax": "data-dependent expression",
    "gaussian_nll_loss": "data-dependent expression .*: choose by torch.where",
    "angle": "argument other = 1j is not supported",
    "CTC": "aten._ctc_loss.default gives depend on data",
    "CTC, sizes as tensors": "aten._ctc_loss.Tensor gives depend on data",
    "unregistered parameters": r"a tensor of \[6, 6\] that requires a gradient and is no parameter",
}


def outcome(name: str, devices: int, parallel: str | None = None) -> str:
    """ "equal", "refused: ...", or what differs."""
    (module, arguments), (plain, _) = made(name), made(name)
    kwargs = arguments if isinstance(arguments, dict) else {}
    args = () if kwargs else arguments
    try:
        program = partitioner.compile(
            module,
            kwargs or args,
            devices=devices,
            cluster="ideal",
            training=True,
            parallel=parallel,
        )
        assert isinstance(program, partitioner.ModuleProgram)
        (loss, results), gradients = program.gradients(*args, **kwargs)
    except PartitionerError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - it is shown
        return f"raised: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    with replaced({(nn.SyncBatchNorm, "forward"): _BatchNorm.forward}):
        expected = plain(*args, **kwargs)
    expected[0].backward()
    right = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    pairs = {"the loss": (loss, expected[0])}
    flat = pytree.tree_leaves(results), pytree.tree_leaves(expected[1])
    pairs |= {f"result {i}": pair for i, pair in enumerate(zip(*flat, strict=True))}
    pairs |= {n: (gradients.get(n, torch.zeros_like(g)), g) for n, g in right.items()}
    buffers = dict(plain.named_buffers())
    pairs |= {n: (b, buffers[n]) for n, b in module.named_buffers() if n in buffers}
    for what, (one, other) in pairs.items():
        try:
            if isinstance(other, Tensor):
                torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
            else:
                assert one == other
        except AssertionError as error:
            return f"differs: {what}: {' '.join(str(error).split())[:200]}"
    missing = right.keys() - gradients.keys()
    lost = [n for n in missing if bool(right[n].count_nonzero())]
    return f"differs: no gradient of {lost[0]}" if lost else "equal"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or MODULES:
        print(f"{name:34}", *(f"{n}: {outcome(name, n)}" for n in (2, 3)), flush=True)
