"""Modules drawn at random from all families of `torch.nn`, trained beside one process.

    python tests/helpers/drawn/drawn_training.py FIRST COUNT

prints a line a module: "equal", how it is refused, or what differs. Modules of seeds from `FURTHER`
on have experts, or run in micro-batches, whose reference is accumulation.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.errors import PartitionerError

Run = Callable[..., Any]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12)
NAMES = (
    "in",
    "class",
    "for",
    "None",
    "self",
    "weight",
    "forward2",
    "a b",
    "x-1",
    "é",
    "0",
    "lambda",
)
ACTIVATIONS: tuple[Run, ...] = (
    *(F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.elu, F.leaky_relu),
    *(F.hardswish, F.mish, torch.sin, torch.atan, F.softsign, F.logsigmoid, F.relu6, F.selu),
)


class Step(nn.Module):
    """Parts, and a function that computes with them."""

    def __init__(self, run: Run, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(*shape) / 2)


# --- steps of values of any rank -----------------------------------------------------------------


def activation(draw: random.Random, _: Tensor) -> nn.Module:
    call = draw.choice(ACTIVATIONS)
    return Step(lambda _, x: call(x))


def arithmetic(draw: random.Random, x: Tensor) -> nn.Module:
    """Elements, reductions and moves along dims that need not be the batch."""
    dim = draw.randrange(x.dim())
    pair = tuple(sorted(draw.sample(range(x.dim()), 2)))
    many: tuple[Run, ...] = (
        lambda _, x: x - x.mean(dim, keepdim=True),
        lambda _, x: x / (1 + x.square().sum(dim, keepdim=True)),
        lambda _, x: x.softmax(dim),
        lambda _, x: x.flip(dim),
        lambda _, x: x.roll(1, dim),
        lambda _, x: x.cumsum(dim) / x.shape[dim],
        lambda _, x: x - x.amax(dim, keepdim=True),
        lambda _, x: x.sort(dim).values,
        lambda _, x: torch.cat([x, x.neg()], dim).narrow(dim, 1, x.shape[dim]),
        lambda _, x: torch.where(x > 0, x, x.detach().mean()),
        lambda _, x: x.masked_fill(x.detach() > 1, 0.5),
        lambda _, x: F.normalize(x, dim=dim),
        lambda _, x: x - x.std(pair, keepdim=True),
        lambda _, x: x * x.var(dim, keepdim=True, correction=0),
        lambda _, x: x + x.logsumexp(dim, keepdim=True),
        lambda _, x: torch.stack([x, x.sin()], dim).mean(dim),
        lambda _, x: x.clamp(-1, 1) + x.detach(),
        lambda _, x: x.transpose(*pair).contiguous().transpose(*pair) * 2,
        lambda _, x: x.transpose(*pair).reshape(x.shape),
        lambda _, x: x.narrow(dim, 0, 1).expand(x.shape) + x,
        lambda _, x: x.index_select(dim, torch.arange(x.shape[dim]).flip(0)),
        lambda _, x: x.gather(dim, x.detach().argsort(dim)),
        lambda _, x: (
            x * torch.arange(x.shape[dim], dtype=x.dtype).view(-1, *[1] * (x.dim() - dim - 1))
        ),
        lambda _, x: torch.cat(list(reversed(x.split(2, dim))), dim),
        lambda _, x: F.pad(x, (1, 1))[..., 1:-1] * 0.5 + x,
        lambda _, x: x.float().double() * 1.5,
        lambda _, x: x.unflatten(dim, (1, -1)).squeeze(dim),
        lambda _, x: x.norm(dim=dim, keepdim=True) * x,
        lambda _, x: x.cummax(dim).values,
        lambda _, x: x.diff(dim=dim, prepend=x.narrow(dim, 0, 1)),
        lambda _, x: x.roll((1, 2), pair),
        lambda _, x: x.tril() if x.dim() == 2 else x.triu(1) + x,
        written,
    )
    run = draw.choice(many)
    return Step(run)


def written(_: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[..., :1] += x[..., -1:]
    y.mul_(0.5)
    return y.relu_()


def weights(draw: random.Random, x: Tensor) -> nn.Module:
    """Parameters of few elements, buffers that are read and written."""
    width = x.shape[-1]
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: Step(lambda m, x: x * m.w + m.b, w=parameter(width), b=parameter(1)),
        lambda: Step(lambda m, x: x * m.w, w=parameter()),
        lambda: Step(lambda m, x: x + m.w, w=parameter(*x.shape[1:])),
        lambda: Step(lambda m, x: x + m.w, w=parameter(*[1] * x.dim())),
        lambda: Step(lambda m, x: x @ (m.w + m.w.T), w=parameter(width, width)),
        lambda: Step(
            lambda m, x: torch.cat([x, m.e.expand(0, *x.shape[1:])]), e=parameter(0, *x.shape[1:])
        ),
        lambda: Step(lambda m, x: x + m.e.sum(), e=parameter(0)),
        lambda: Step(lambda m, x: x * m.c, c=randn(width)),
        lambda: Step(counted, n=torch.zeros(()), l=torch.zeros((), dtype=torch.long)),
        lambda: Step(averaged, c=torch.zeros(width, dtype=torch.float64)),
        lambda: Step(averaged, c=nn.Parameter(randn(width), requires_grad=False)),
        lambda: Step(lambda m, x: x + m.w.exp(), w=nn.Parameter(randn(width), requires_grad=False)),
        nn.PReLU,
        lambda: Step(lambda m, x: x @ m.w.to(torch.float32).double(), w=parameter(width, width)),
        lambda: Step(lambda m, x: x @ m.w[0] + m.w[1].sum(0), w=parameter(2, width, width)),
        lambda: Step(
            lambda m, x: x @ torch.block_diag(*m.w),
            w=nn.ParameterList([parameter(n, n) for n in (width - width // 2, width // 2)]),
        ),
        lambda: Step(lambda m, x: x * m.a + m.b.detach(), a=parameter(width), b=parameter(width)),
        lambda: Step(constants, k=0, unused=parameter(3, 3)),
    )
    return draw.choice(kinds)()


def counted(m: Any, x: Tensor) -> Tensor:
    m.n += 1
    m.l.add_(2)
    return x * m.n / m.l


def averaged(m: Any, x: Tensor) -> Tensor:
    mean = x.detach().mean(tuple(range(x.dim() - 1)))
    with torch.no_grad():
        m.c.mul_(0.9).add_(mean, alpha=0.1)
    return x - m.c


def constants(m: Any, x: Tensor) -> Tensor:
    m.k = x.dim()
    return x * m.k


def size(draw: random.Random) -> int:
    return draw.choice(SIZES)


# --- by rank -------------------------------------------------------------------------------------


def linear(draw: random.Random, x: Tensor) -> nn.Module:
    width, out = x.shape[-1], size(draw)
    bias = draw.random() < 0.6
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.Linear(width, out, bias=bias),
        lambda: nn.Linear(width, out, bias=bias),
        lambda: nn.Linear(width, out, bias=bias),
        lambda: nn.Sequential(nn.Linear(width, 4 * out), nn.GELU(), nn.Linear(4 * out, out)),
        lambda: parametrizations.weight_norm(nn.Linear(width, out, bias=bias)),
        lambda: parametrizations.spectral_norm(nn.Linear(width, out)),
        lambda: Step(lambda m, x: x @ m.u @ m.v, u=parameter(width, 2), v=parameter(2, out)),
        lambda: Step(lambda m, x: torch.einsum("...i,oi->...o", x, m.w), w=parameter(out, width)),
        lambda: Step(lambda m, x: F.glu(m.l(x)), l=nn.Linear(width, 2 * out)),
        lambda: Step(lambda m, x: m.b(x, x), b=nn.Bilinear(width, width, out, bias=bias)),
        lambda: Step(
            lambda m, x: sum(
                p * e(x) for p, e in zip(m.g(x).softmax(-1).split(1, -1), m.e, strict=True)
            ),
            g=nn.Linear(width, 3),
            e=nn.ModuleList([nn.Linear(width, out) for _ in range(3)]),
        ),
        lambda: Step(
            routed, g=nn.Linear(width, 4), w=parameter(4, width, out), b=parameter(4, out)
        ),
        lambda: Step(lambda m, x: m.l(x) + m.l(x.flip(-1)), l=nn.Linear(width, out)),
        lambda: Step(lambda m, x: F.linear(x, m.w.T.contiguous()), w=parameter(width, out)),
        lambda: Step(
            lambda m, x: torch.cat([one(x) for one in m.l], -1),
            l=nn.ModuleList([nn.Linear(width, n) for n in (1, out)]),
        ),
        lambda: nn.RMSNorm(width),
        lambda: nn.LayerNorm(width, elementwise_affine=bias),
    )
    return draw.choice(kinds)()


def routed(m: Any, x: Tensor) -> Tensor:
    chance, chosen = m.g(x).softmax(-1).max(-1)
    y = torch.einsum("...i,...io->...o", x, m.w[chosen]) + m.b[chosen]
    return y * chance.unsqueeze(-1)


def rank2(draw: random.Random, x: Tensor) -> nn.Module:
    width = x.shape[1]
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    parts = draw.choice(divisors)
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.BatchNorm1d(width, affine=draw.random() < 0.7),
        lambda: nn.SyncBatchNorm(width),
        lambda: Step(lambda _, x: x.view(-1, parts, width // parts)),
        lambda: Step(lambda _, x: (x @ x.T).softmax(-1) @ x),
        lambda: Step(lambda m, x: m.c(x, x.new_zeros(x.shape[0], 4)), c=nn.GRUCell(width, 4)),
        lambda: Step(lambda m, x: m.c(x)[0], c=nn.LSTMCell(width, 5)),
        lambda: nn.GroupNorm(parts, width),
        lambda: Step(lambda m, x: torch.cdist(x, m.p), p=parameter(3, width)),
        lambda: Step(
            lambda m, x: m.t((x[:, :1].detach() > 0).long()).squeeze(1) + x,
            t=nn.Embedding(2, width),
        ),
        lambda: Step(
            lambda m, x: m.t((x.detach() > 0).long()) * x,
            t=nn.EmbeddingBag(2, width, mode=draw.choice(("sum", "mean"))),
        ),
        lambda: Step(lambda _, x: x[:, None, :].repeat(1, 3, 1)),
    )
    return draw.choice(kinds)()


def rank3(draw: random.Random, x: Tensor) -> nn.Module:
    _, length, width = x.shape
    heads = draw.choice([n for n in range(1, width + 1) if width % n == 0])
    causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.TransformerEncoderLayer(
            width, heads, size(draw), dropout=0.0, batch_first=True, norm_first=draw.random() < 0.5
        ),
        lambda: Step(
            lambda m, x: m.a(x, x, x, need_weights=False)[0],
            a=nn.MultiheadAttention(width, heads, batch_first=True, bias=draw.random() < 0.5),
        ),
        lambda: Step(
            lambda m, x: m.a(x, x, x, attn_mask=m.mask)[0],
            a=nn.MultiheadAttention(width, heads),
            mask=nn.Transformer.generate_square_subsequent_mask(x.shape[0], dtype=torch.float64),
        ),
        lambda: Step(
            lambda m, x: m.a(x, x[:, :1], x[:, :1], key_padding_mask=x[:, :1, 0].detach() > 9)[0],
            a=nn.MultiheadAttention(width, heads, batch_first=True),
        ),
        lambda: Step(
            lambda m, x: attention(m.q(x), heads, m.mask),
            q=nn.Linear(width, 3 * width),
            mask=causal,
        ),
        lambda: Step(
            lambda m, x: m.r(x)[0],
            r=nn.LSTM(width, 3, batch_first=draw.random() < 0.5, bidirectional=draw.random() < 0.3),
        ),
        lambda: Step(lambda m, x: m.r(x)[0], r=nn.GRU(width, 4, batch_first=True)),
        lambda: Step(
            lambda m, x: m.c(x.mT).mT,
            c=nn.Conv1d(
                width,
                size(draw),
                3,
                padding=1,
                padding_mode=draw.choice(("zeros", "circular", "replicate")),
            ),
        ),
        lambda: nn.Conv1d(length, size(draw), 1),
        lambda: Step(lambda _, x: x.mean(1)),
        lambda: Step(lambda _, x: x.max(1).values),
        nn.Flatten,
        lambda: Step(lambda _, x: x.flatten(0, 1).view(x.shape) * x.shape[0]),
        lambda: Step(
            lambda m, x: m.l(x.flatten(0, 1)).view(x.shape[0], length, -1),
            l=nn.Linear(width, size(draw)),
        ),
        lambda: Step(lambda _, x: x.unsqueeze(1)),
        lambda: nn.LayerNorm((length, width)),
        lambda: nn.BatchNorm1d(length),
        lambda: nn.GroupNorm(1, length),
        lambda: nn.InstanceNorm1d(length, affine=True),
        lambda: Step(lambda _, x: x.mT),
        lambda: Step(lambda _, x: x[:, ::2]),
        lambda: Step(lambda m, x: x + m.p.weight[: x.shape[1]], p=nn.Embedding(12, width)),
        lambda: Step(lambda _, x: F.fold(x.mT, (length, 1), (1, 1)).squeeze(-1)),
        lambda: Step(lambda _, x: torch.bmm(x, x.mT)),
        lambda: nn.MaxPool1d(2, 1, padding=1),
        lambda: Step(lambda _, x: torch.fft.rfft(x, dim=1).abs()),
    )
    return draw.choice(kinds)()


def attention(qkv: Tensor, heads: int, mask: Tensor) -> Tensor:
    q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def rank4(draw: random.Random, x: Tensor) -> nn.Module:
    _, channels, height, width = x.shape
    out = size(draw)
    groups = draw.choice([n for n in range(1, channels + 1) if channels % n == 0])
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.Conv2d(
            channels, out, 3, padding=1, stride=draw.choice((1, 1, 2)), bias=draw.random() < 0.5
        ),
        lambda: nn.Conv2d(channels, out * groups, (1, 3), padding="same", groups=groups),
        lambda: nn.Conv2d(channels, channels, 3, padding=2, dilation=2, groups=channels),
        lambda: nn.Conv2d(
            channels,
            out,
            3,
            padding=1,
            padding_mode="circular" if min(height, width) > 1 else "zeros",
        ).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: nn.ConvTranspose2d(
            channels, out * groups, 2, stride=draw.choice((1, 2)), groups=groups
        ),
        lambda: nn.BatchNorm2d(channels, momentum=0.3),
        lambda: nn.SyncBatchNorm(channels),
        lambda: nn.GroupNorm(groups, channels),
        lambda: (
            nn.InstanceNorm2d(channels, affine=True, track_running_stats=draw.random() < 0.5)
            if height * width > 1
            else nn.Identity()
        ),
        lambda: nn.MaxPool2d(3, 2, padding=1),
        lambda: nn.AvgPool2d(3, 1, padding=1, count_include_pad=draw.random() < 0.5),
        lambda: nn.AdaptiveAvgPool2d((2, 1)),
        lambda: nn.AdaptiveMaxPool2d(2),
        lambda: nn.Upsample(scale_factor=2, mode=draw.choice(("nearest", "bilinear"))),
        lambda: Step(lambda _, x: F.interpolate(x, size=(3, 5), mode="bicubic")),
        lambda: nn.PixelUnshuffle(2) if height % 2 + width % 2 == 0 else nn.ZeroPad2d((1, 0, 0, 1)),
        lambda: Step(lambda _, x: x.contiguous(memory_format=torch.channels_last) * 1.5),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.ChannelShuffle(groups),
        lambda: Step(lambda _, x: F.unfold(x, 2, padding=1)),
        lambda: Step(lambda _, x: x.flatten(2)),
        lambda: Step(lambda _, x: x.mean((2, 3))),
        lambda: Step(lambda _, x: x.flatten(2).mT),
        nn.Flatten,
        lambda: Step(lambda _, x: x.permute(0, 2, 3, 1)),
        lambda: nn.Conv2d(channels, 1, 1),
        lambda: nn.LPPool2d(2, 1),
        lambda: Step(
            lambda m, x: m.c(x.unsqueeze(2)).squeeze(2),
            c=nn.Conv3d(channels, out, (1, 2, 2), padding=(0, 1, 1)),
        ),
        lambda: Step(
            lambda m, x: F.grid_sample(
                x,
                F.affine_grid(m.t.expand(x.shape[0], 2, 3), list(x.shape), align_corners=False),
                align_corners=False,
            ),
            t=parameter(1, 2, 3),
        ),
    )
    return draw.choice(kinds)()


def mixture(draw: random.Random, x: Tensor) -> nn.Module:
    """Experts for each row: in a list, or in stacked weights."""
    from helpers.modules.expert_models import Experts, Listed, Mlp, SwiGlu

    width, experts, chosen = x.shape[-1], draw.choice((3, 4, 5)), draw.choice((1, 2))
    if draw.random() < 0.5:
        kinds: tuple[Callable[[], nn.Module], ...] = (
            lambda: Mlp(width, 5),
            lambda: SwiGlu(width, 6),
            lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()),
        )
        form = draw.choice(("add", "stack", "einsum", "where"))
        shared, soft = draw.random() < 0.3, draw.random() < 0.3
        make = draw.choice(kinds)
        # weights of one choice add up to 1: the router's gradient would be rounding alone
        return Listed(make, experts, form, 0 if soft else 2, shared=shared, width=width)
    acts: tuple[Run, ...] = (F.silu, F.gelu, F.relu, lambda x: x.clamp(-1, 1) * x.sigmoid())
    flags = {name: draw.random() < 0.5 for name in ("gated", "transposed", "grouped", "biased")}
    layer = Experts(width, 6, experts, chosen, **flags, act=draw.choice(acts))
    return Step(lambda m, x: m.l(x.flatten(0, -2)).view(x.shape), l=layer)


BY_RANK: Mapping[int, Run] = {2: rank2, 3: rank3, 4: rank4}


class Net(nn.Module):
    """Steps one after the other, some with a value before the last, then a loss.

    Attributes:
        chain: The steps, by odd names.
        joined: The earlier value that is added to a step's result, by the step's name.
        mixture: Experts behind the steps, if there are any.
    """

    def __init__(
        self, draw: random.Random, inputs: Sequence[Tensor], *, experts: bool = False
    ) -> None:
        super().__init__()
        self.chain = nn.ModuleDict()
        self.kind = draw.choice(("mse", "class", "huber", "bce", "kl", "l1", "square"))
        self.shows = draw.choice(("loss", "tuple", "dict"))
        self.words = (
            nn.Embedding(7, draw.choice((4, 6))) if not inputs[0].is_floating_point() else None
        )
        self.tied: nn.Linear | None = None
        self.joined: dict[str, int] = {}
        names = draw.sample(NAMES, len(NAMES))
        with torch.no_grad():
            values = [self._begin(inputs[0])]
            while len(self.chain) < 6 and len(self.chain) < 2 + draw.randint(0, 4):
                x = values[-1]
                families = [
                    activation,
                    arithmetic,
                    weights,
                    linear,
                    linear,
                    BY_RANK[x.dim()],
                    BY_RANK[x.dim()],
                ]
                step = draw.choice(families)(draw, x).double()
                state = {name: one.clone() for name, one in step.state_dict().items()}
                y = step(x)
                step.load_state_dict(state)
                if y.dim() not in BY_RANK or y.shape[0] != x.shape[0] or not 0 < y.numel() < 4000:
                    continue
                name = names[len(self.chain)]
                self.chain[name] = step
                alike = [i for i, one in enumerate(values) if one.shape == y.shape]
                if alike and draw.random() < 0.4:
                    self.joined[name] = draw.choice(alike)
                    y = y + values[self.joined[name]]
                values.append(y)
        self.head = nn.Linear(
            values[-1].shape[-1], 6 if self.words is None else self.words.embedding_dim
        )
        if self.words is not None and draw.random() < 0.7:
            self.tied = nn.Linear(self.words.embedding_dim, 7, bias=draw.random() < 0.5)
            self.tied.weight = self.words.weight
        self.mixture = mixture(draw, values[-1]) if experts else None
        chosen = [p for p in self.chain.parameters() if draw.random() < 0.1]
        for one in chosen:
            one.requires_grad_(False)

    def _begin(self, x: Tensor) -> Tensor:
        return x if self.words is None else self.words.double()(x)

    def forward(self, x: Tensor, target: Tensor, extra: Tensor | None = None) -> Any:
        values = [x if self.words is None else self.words(x)]
        for name, step in self.chain.items():
            y = step(values[-1])
            values.append(y + values[self.joined[name]] if name in self.joined else y)
        if self.mixture is not None:
            values.append(values[-1] + self.mixture(values[-1]))
        y = self.head(values[-1])
        if self.tied is not None:
            y = self.tied(y)
        y = y.flatten(1, -2).mean(1) if y.dim() > 2 else y
        if extra is not None:
            y = y * extra
        loss = self._loss(y, target)
        if self.shows == "tuple":
            return loss, values[-1], 3
        return {"loss": loss, "scores": y.detach()} if self.shows == "dict" else loss

    def _loss(self, y: Tensor, target: Tensor) -> Tensor:
        like = target[:, None].to(y.dtype).expand(y.shape)
        if self.kind == "class":
            return F.cross_entropy(y, target % y.shape[1], ignore_index=1, label_smoothing=0.1)
        if self.kind == "bce":
            return F.binary_cross_entropy_with_logits(y, like / 7)
        if self.kind == "kl":
            return F.kl_div(y.log_softmax(1), like.softmax(1), reduction="batchmean")
        if self.kind == "square":
            return (y.square().sum(1) * (target > 1)).sum() / (target > 1).sum().clamp(min=1)
        return {"mse": F.mse_loss, "huber": F.huber_loss, "l1": F.l1_loss}[self.kind](y, like)


@dataclass(frozen=True)
class Case:
    """A drawn module with batches and the kind of parallelism and devices to train it with.

    Attributes:
        micro_batches: Parts of a batch, one after the other; 1 for the batch as a whole.
    """

    module: nn.Module
    batches: tuple[tuple[Tensor, ...], ...]
    parallel: str | None
    devices: int
    mesh: Mapping[str, int] | None
    optimizer: str
    micro_batches: int = 1

    def __str__(self) -> str:
        parts = " ".join(type(one).__name__ for one in self.module.children())
        mesh = f" {dict(self.mesh)}" if self.mesh else ""
        micro = f" in {self.micro_batches}" if self.micro_batches > 1 else ""
        kind = f"{self.parallel or 'auto'} on {self.devices}{mesh}{micro}"
        return f"{kind}, {self.optimizer}: {parts}"

    def compiled(self) -> ModuleProgram:
        """The program.

        Raises:
            PartitionerError: It is refused.
        """
        is_given = self.parallel == "pp" or self.micro_batches > 1
        options: dict[str, Any] = {"micro_batches": self.micro_batches} if is_given else {}
        program = partitioner.compile(
            self.module,
            self.batches[0],
            devices=self.devices,
            mesh=self.mesh,
            parallel=self.parallel,
            training=True,
            cluster="ideal",
            optimizer=self.optimizer,
            time_limit_s=5,
            **options,
        )
        assert isinstance(program, ModuleProgram)
        return program


WAYS: tuple[tuple[str | None, int, Mapping[str, int] | None], ...] = (
    *(("dp", n, None) for n in (2, 3)),
    *(("zero1", n, None) for n in (2, 3)),
    *(("zero2", n, None) for n in (2, 4)),
    *(("zero3", n, None) for n in (2, 3, 4)),
    *(("tp", n, None) for n in (2, 3)),
    *(("pp", n, None) for n in (2, 3)),
    *((None, n, None) for n in (2, 3, 4)),
    ("dp+tp", 4, {"dp": 2, "tp": 2}),
    ("dp+tp", 6, {"dp": 2, "tp": 3}),
    ("zero3+tp", 4, {"dp": 2, "tp": 2}),
    ("zero1+tp", 6, {"dp": 3, "tp": 2}),
)


#: Kinds of the seeds from `FURTHER` on, and whether they run in micro-batches.
FURTHER = 100_000
FURTHER_WAYS: tuple[tuple[str | None, int, Mapping[str, int] | None, bool], ...] = (
    *(("ep", n, None, False) for n in (2, 3)),
    ("ep", 2, None, True),
    ("dp+ep", 4, {"dp": 2, "ep": 2}, False),
    ("ep+tp", 4, {"ep": 2, "tp": 2}, False),
    *((kind, 2, None, True) for kind in ("dp", "zero1", "zero3", "tp", None)),
    *(("pp", n, None, True) for n in (2, 3)),
)


#: How modules are refused: the sentences that say so.
REFUSALS = (
    "no input has a batch that can be cut",
    "fewer than",
    "no parameter that requires a gradient gets one",
    "leaves no strategy for '/mixture/l/experts",  # whole inside, and fewer than all devices
    "The shape of the 2D attn_mask is",  # of the whole batch, which the module refuses in parts
)


def refused(text: str) -> bool:
    """Whether a refusal is one of those known."""
    return "\n" not in text and any(sentence in text for sentence in REFUSALS)


def way_of(seed: int) -> tuple[str | None, int, Mapping[str, int] | None]:
    """The kind of parallelism, devices and mesh of a drawn module."""
    if seed >= FURTHER:
        return _further_way_of(seed)[:3]
    return random.Random(-1 - seed).choice(WAYS)


def _further_way_of(seed: int) -> tuple[str | None, int, Mapping[str, int] | None, bool]:
    return random.Random(-1 - seed).choice(FURTHER_WAYS)


def drawn(seed: int) -> Case:
    """The same each time."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = draw.choice((4, 5, 6, 7, 8, 12))
    shape = {
        "features": (batch, size(draw)),
        "words": (batch, draw.choice((3, 5, 6))),
        "sequence": (batch, draw.choice((1, 3, 4, 5)), draw.choice((1, 4, 6))),
        "image": (batch, draw.choice((1, 3, 4)), draw.choice((5, 6)), draw.choice((4, 7))),
    }
    kind = draw.choice(tuple(shape))
    lay = draw.choice(("plain", "plain", "expanded", "turned", "gaps"))

    def one() -> Tensor:
        if kind == "words":
            return torch.randint(7, shape[kind])
        x = randn(*shape[kind])
        if lay == "expanded":
            return randn(1, *shape[kind][1:]).expand(shape[kind])
        if lay == "turned":
            return x.mT.contiguous().mT
        return randn(*shape[kind][:-1], 2 * x.shape[-1])[..., ::2] if lay == "gaps" else x

    more = draw.random() < 0.3
    batches = tuple(
        (one(), torch.randint(7, (batch,)), *([randn(batch, 1).exp()] if more else []))
        for _ in range(3)
    )
    parallel, devices, mesh = way_of(seed)
    module = Net(draw, batches[0], experts="ep" in (parallel or "")).double()
    name, parts = draw.choice(("adamw", "sgd")), 1
    if seed >= FURTHER and _further_way_of(seed)[3]:
        counts = [n for n in range(2, batch + 1) if batch % n == 0 and batch // n >= devices]
        parts = draw.choice(counts or [1])
    return Case(module, batches, parallel, devices, mesh, name, parts)


def optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=1e-2)
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9)


def loss_of(results: Any) -> Tensor:
    loss: Tensor = pytree.tree_leaves(results)[0]
    return loss


def accumulated(module: nn.Module, batch: Sequence[Tensor], parts: int) -> list[Any]:
    """Add up gradients of equal parts of a batch; returns the mean loss, of the whole all results.

    The loss of all parts is the mean of theirs.
    """
    losses = []
    for part in zip(*(one.chunk(parts) for one in batch), strict=True):
        results = module(*part)
        (loss_of(results) / parts).backward()
        losses.append(loss_of(results).detach())
    return pytree.tree_leaves(results) if parts == 1 else [torch.stack(losses).mean()]


def outcome(seed: int) -> str:
    """ "equal", "refused: ...", or what differs."""
    case, plain = drawn(seed), drawn(seed).module
    try:
        program = case.compiled()
    except PartitionerError as error:
        return f"refused: {error}"
    ours, theirs = optimizer(case.optimizer, case.module), optimizer(case.optimizer, plain)
    for step, batch in enumerate(case.batches):
        results, gradients = program.gradients(*batch)
        expected = accumulated(plain, batch, case.micro_batches)
        pairs = list(zip(pytree.tree_leaves(results), expected, strict=case.micro_batches == 1))
        named = {f"result {i}": pair for i, pair in enumerate(pairs)}
        own = dict(case.module.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                gradient = gradients.get(name, torch.zeros_like(parameter))
                named[f"gradient of {name}"] = gradient, parameter.grad
                own[name].grad = gradient.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        state = case.module.state_dict()
        named |= {name: (state[name], one) for name, one in plain.state_dict().items()}
        for what, (one, other) in named.items():
            try:
                if isinstance(other, Tensor):
                    same_nan = case.micro_batches > 1  # parts whose targets are all ignored
                    torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7, equal_nan=same_nan)
                else:
                    assert one == other
            except AssertionError as error:
                return f"differs: step {step}: {what}: {' '.join(str(error).split())[:200]}"
    return "equal"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        try:
            said = outcome(seed)
        except Exception as error:  # noqa: BLE001 - it is shown
            said = f"raised: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{seed:5} {said[:500]}", "" if said == "equal" else f"[{drawn(seed)}]", flush=True)
