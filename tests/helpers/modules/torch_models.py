"""Small PyTorch models of well-known architectures with random weights.

Each is small enough for a test and large enough that every dim divides by four: batch, heads,
channels and experts can be cut on two or four devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

BATCH, ROWS, VOCABULARY, WIDTH, HEADS, CLASSES = 4, 8, 32, 16, 4, 8


@dataclass(frozen=True)
class Model:
    """A module and how to call it.

    Attributes:
        module: In evaluation mode unless it was built for training.
        inputs: Keyword arguments; in training with labels, so that the loss is the first result.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]

    def more_inputs(self, seed: int) -> dict[str, Tensor]:
        """Other inputs of the same sizes and types."""
        generator = torch.Generator().manual_seed(seed)
        return {name: _like(name, tensor, generator) for name, tensor in self.inputs.items()}


def _like(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator)
    if "mask" in name:
        return tensor
    return torch.randint(0, int(tensor.max()) + 1, tensor.shape, generator=generator)


def _ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, ROWS))


def _images(size: int = 16, channels: int = 4) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _text(make: Callable[[], nn.Module], training: bool, **more: Tensor) -> Model:
    """A language model; its targets are its own ids."""
    ids = _ids()
    labels = {"labels": ids.clone()} if training else {}
    return Model(make(), {"input_ids": ids, **more, **labels})


def _pictures(make: Callable[[], nn.Module], training: bool, size: int = 16) -> Model:
    labels = {"labels": torch.randint(0, CLASSES, (BATCH,))} if training else {}
    return Model(make(), {"pixel_values": _images(size), **labels})


def gpt2(training: bool, dropout: float) -> Model:
    """Fused projections, learned positions, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=ROWS,
        n_embd=WIDTH,
        n_layer=1,
        n_head=HEADS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _text(lambda: GPT2LMHeadModel(config), training)


def llama(training: bool, dropout: float) -> Model:
    """Rotary positions, grouped queries, RMS norm, gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=ROWS,
        attention_dropout=dropout,
        use_cache=False,
    )
    return _text(lambda: LlamaForCausalLM(config), training)


def bert(training: bool, dropout: float) -> Model:
    """An encoder with a padding mask."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=ROWS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    mask = torch.ones(BATCH, ROWS, dtype=torch.int64)
    mask[0, -3:] = 0
    return _text(lambda: BertForMaskedLM(config), training, attention_mask=mask)


def vit(training: bool, dropout: float) -> Model:
    """Patches, a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16,
        patch_size=8,
        num_channels=4,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _pictures(lambda: ViTForImageClassification(config), training)


def t5(training: bool, dropout: float) -> Model:
    """Encoder and decoder, relative positions, attention written out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=HEADS,
        relative_attention_num_buckets=4,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )

    def make() -> nn.Module:
        module = T5ForConditionalGeneration(config)
        module.set_attn_implementation("eager")
        return module

    model = _text(make, training)
    more = {} if training else {"decoder_input_ids": _ids()}
    return Model(model.module, {**model.inputs, **more})


def mixtral(training: bool, dropout: float) -> Model:
    """A router and four experts, two a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=ROWS,
        attention_dropout=dropout,
        use_cache=False,
    )

    def make() -> nn.Module:
        module = MixtralForCausalLM(config)
        module.set_experts_implementation("batched_mm")
        return module

    return _text(make, training)


def resnet(training: bool, dropout: float) -> Model:
    """Convolutions and batch norm, whose running statistics training writes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    del dropout
    config = ResNetConfig(
        num_channels=4,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=CLASSES,
    )
    return _pictures(lambda: ResNetForImageClassification(config), training)


def convnext(training: bool, dropout: float) -> Model:
    """Depthwise convolutions, norms over channels, layer scale."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    del dropout
    config = ConvNextConfig(
        num_channels=4,
        patch_size=2,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        num_labels=CLASSES,
    )
    return _pictures(lambda: ConvNextForImageClassification(config), training)


class _Block(nn.Module):
    """Two convolutions with group norm."""

    def __init__(self, inner: int, outer: int, dropout: float) -> None:
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, padding=1)
        self.two = nn.Conv2d(outer, outer, 3, padding=1)
        self.norm_one = nn.GroupNorm(4, outer)
        self.norm_two = nn.GroupNorm(4, outer)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm_one(self.one(x)))
        return F.silu(self.norm_two(self.two(self.dropout(x))))


class UNet(nn.Module):
    """Two levels down and up again, with skip connections; labels are a class a pixel."""

    def __init__(self, dropout: float, width: int = 8) -> None:
        super().__init__()
        self.enter = _Block(4, width, dropout)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = _Block(2 * width, 2 * width, dropout)
        self.lower = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.deepest = _Block(2 * width, 2 * width, dropout)
        self.rise = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.middle_up = _Block(4 * width, width, dropout)
        self.leave = _Block(2 * width, width, dropout)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        high = self.enter(pixel_values)
        middle = self.middle(self.down(high))
        low = self.deepest(self.lower(middle))
        x = self.middle_up(torch.cat([self.rise(low), middle], 1))
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        scores = self.head(self.leave(torch.cat([x, high], 1)))
        return scores if labels is None else (F.cross_entropy(scores, labels), scores)


def unet(training: bool, dropout: float) -> Model:
    """Down and up again, with skip connections and group norm."""
    images = _images()
    labels = {"labels": torch.randint(0, CLASSES, images[:, 0].shape)} if training else {}
    return Model(UNet(dropout), {"pixel_values": images, **labels})


BUILDERS: Mapping[str, Callable[[bool, float], Model]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "mixtral": mixtral,
    "resnet": resnet,
    "convnext": convnext,
    "unet": unet,
}


def build(name: str, *, training: bool = False, dropout: float = 0.0) -> Model:
    """A model, the same at every call.

    Args:
        name: One of `BUILDERS`.
        training: With labels, and in training mode.
        dropout: Probability, where the architecture has dropout.
    """
    torch.manual_seed(0)
    model = BUILDERS[name](training, dropout)
    model.module.train(training)
    return model


def gradients(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The results of the module, loss first, and the gradient of each trained parameter."""
    results = module(**inputs)
    results[0].backward()
    return results, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
