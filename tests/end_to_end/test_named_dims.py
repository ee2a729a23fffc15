"""Models laid out by named dims in a few lines: cut as said on every rank, and equal."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import partitioner
from helpers.modules.small_gpt import small_gpt
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.errors import OptionError
from partitioner.ir.plan import PlacedNode, resolve
from partitioner.strategies.constraints import ConstraintError, Constraints

GPT = {
    "dims": {"batch": "ids.0", "heads": "*.q.weight.0", "hidden": "*.up.weight.-2"},
    "layout": {"batch": "rows", "heads": "cols", "hidden": "cols"},
}


class Fused(nn.Module):
    """Attention whose projection is one matrix of all heads' queries, keys and values."""

    def __init__(self, heads: int = 5, size: int = 4) -> None:
        super().__init__()
        self.heads, width = heads, heads * size
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, width)).square().mean()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(3, 6)
        self.two = nn.Conv2d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)).relu()).square().mean()


def products(program: Compiled | ModuleProgram) -> dict[str, PlacedNode]:
    placed = resolve(program.graph, program.plan)
    return {p.node.name: p for p in placed if p.rule is not None and p.rule.is_product}


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cols", [2, 3])
def test_a_transformer_in_a_few_lines_on_axes_of_any_name(cols: int, training: bool) -> None:
    model, batch = small_gpt()
    program = partitioner.compile(
        model,
        batch,
        devices=2 * cols,
        mesh={"rows": 2, "cols": cols},
        training=training,
        constraints=GPT,
        time_limit_s=5,
    )
    assert program.verify()
    by_name = products(program)
    for name in ("q", "k", "v", "up"):
        assert {
            name: at.axes for name, at in by_name[f"/blocks/0/{name}/addmm"].layouts.items()
        } == {"m": ("rows",), "n": ("cols",)}
    for name in ("o", "down"):
        assert by_name[f"/blocks/0/{name}/addmm"].layouts["k"].axes == ("cols",)
    assert all(
        "rows" in {a for at in p.layouts.values() for a in at.axes} for p in by_name.values()
    )


@pytest.mark.parametrize(("devices", "parts"), [(2, (3, 2)), (3, (2, 2, 1)), (5, (1,) * 5)])
@pytest.mark.parametrize("training", [False, True])
def test_a_fused_projection_is_cut_between_heads(
    devices: int, parts: tuple[int, ...], training: bool
) -> None:
    torch.manual_seed(0)
    named = {"dims": {"heads": "qkv.weight.0"}, "layout": {"heads": "tp"}}
    model, batch = Fused(), (torch.randn(3, 7, 20),)
    program = partitioner.compile(
        model, batch, devices=devices, training=training, constraints=named, time_limit_s=5
    )
    assert program.verify()
    out = products(program)["/o/addmm"]
    assert out.layouts["k"].axes == ("tp",)
    assert sorted(out.layouts["k"].sizes(), reverse=True) == [4 * n for n in parts]


@pytest.mark.parametrize(("devices", "training"), [(2, False), (3, True), (5, True)])
def test_channels_of_a_convolution(devices: int, training: bool) -> None:
    torch.manual_seed(0)
    named = {"dims": {"image": "x.0", "inner": "two.weight.0"}, "layout": {"inner": "tp"}}
    program = partitioner.compile(
        Conv(),
        (torch.randn(2, 3, 9, 8),),
        devices=devices,
        training=training,
        constraints=named,
        time_limit_s=5,
    )
    assert program.verify()
    (_, weight), *_ = [*products(program)["/two/convolution"].operands()][1:]
    assert [layout.axes for layout in weight.sharding.dims] == [("tp",), (), (), ()]


def test_an_onnx_decoder_with_grouped_heads_from_a_file(tmp_path: Path) -> None:
    model = examples.build(
        "llama",
        batch=3,
        seq=7,
        layers=1,
        hidden=48,
        heads=6,
        kv_heads=3,
        intermediate=66,
        vocab=51,
    )
    path = tmp_path / "layout.toml"
    path.write_text(
        '[dims]\nbatch = "input_ids.0"\nheads = "*q_proj.weight.1"\nhidden = "*up_proj.weight.-1"\n'
        '[layout]\nbatch = "data"\nheads = "model"\nhidden = "model"\n'
        '[[pin]]\ntensor = "lm_head.weight"\nreplicate = true\n'
    )
    mesh = {"data": 2, "model": 3}
    program = partitioner.compile(model, devices=6, mesh=mesh, constraints=path, time_limit_s=5)
    assert program.verify()
    for name, placed in products(program).items():
        axes = [layout.axes for layout in placed.layouts.values()]
        assert ("data",) in axes, name
        assert (("model",) in axes) == (name != "logits"), name


def test_a_dim_that_lies_over_no_axis_is_whole() -> None:
    named = {
        "dims": {"hidden": "*.up.weight.0", "batch": "ids.0"},
        "layout": {"hidden": "", "batch": ["dp", "tp"]},
    }
    model, batch = small_gpt()
    program = partitioner.compile(
        model, batch, devices=4, mesh={"dp": 2, "tp": 2}, constraints=named, time_limit_s=5
    )
    assert program.verify()
    for placed in products(program).values():
        assert placed.layouts["m"].axes == ("dp", "tp")


@pytest.mark.slow
def test_a_layout_beside_a_kind_of_parallelism() -> None:
    model, batch = small_gpt()
    named = {"dims": {"hidden": "*.up.weight.0"}, "layout": {"hidden": "mine"}}
    program = partitioner.compile(
        model,
        batch,
        devices=4,
        training=True,
        parallel="dp",
        mesh={"dp": 2, "mine": 2},
        constraints=Constraints.of(named),
        time_limit_s=5,
    )
    assert program.verify()
    by_name = products(program)
    assert by_name["/blocks/0/up/addmm"].layouts["n"].axes == ("mine",)
    assert all("dp" in {a for at in p.layouts.values() for a in at.axes} for p in by_name.values())


def refused(dims: Mapping[str, object], layout: Mapping[str, object], **more: object) -> str:
    model, batch = small_gpt()
    options = {"devices": 2, "constraints": {"dims": dims, "layout": layout}, **more}
    with pytest.raises((ConstraintError, OptionError)) as caught:
        partitioner.compile(model, batch, time_limit_s=5, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("dims", "layout", "message"),
    [
        ({"b": "idz.0"}, {"b": "dp"}, "dim b: 'idz' matches no tensor, node, .* mean 'ids'"),
        ({"b": "ids.0", "c": "idz.0"}, {"b": "dp"}, "dim c: 'idz' matches no tensor, node, "),
        ({"b": "ids.0", "c": ["ids.1", "ids.2"]}, {}, r"dim c: 'ids.2' matches 'ids', which is "),
        ({"b": "ids.2"}, {"b": "dp"}, r"'ids.2' matches 'ids', which is int64\[.* has no dim 2"),
        ({"b": "ids"}, {"b": "dp"}, "dim b: 'ids' names no dim: end it with one, as in 'ids.0'"),
        ({"batch": "ids.0"}, {"bach": "dp"}, "layout bach: no dim .* did you mean 'batch'"),
        ({"b": []}, {"b": "dp"}, "dim b: it names no dim of a tensor"),
        ({"b": 3}, {"b": "dp"}, "dim b: 3 is not a string or a list of strings"),
        ({"b": "ids.0"}, {"b": "dp, dp"}, "layout b: an axis is named twice"),
        (
            {"a": "ids.0", "b": "labels.0"},
            {"a": "dp", "b": ""},
            "layout a = 'dp' .* layout b = .*: both are one dim of ",
        ),
        (
            {"a": "ids.0", "b": "*.up.weight.0"},
            {"a": "dp", "b": "dp"},
            "has both dims, and they cannot both lie over axis 'dp'",
        ),
        ({"a": "ids.0", "b": "ids.1"}, {"a": "x", "b": "y"}, "over x and y wants a mesh"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    dims: Mapping[str, object], layout: Mapping[str, object], message: str
) -> None:
    assert re.search(message, refused(dims, layout))


@pytest.mark.parametrize(
    "more", [{"devices": 1}, {"parallel": "pp", "micro_batches": 2, "training": True}]
)
def test_names_are_checked_where_nothing_can_be_cut(more: Mapping[str, Any]) -> None:
    text = refused({"b": "idz.0"}, {}, **more)
    assert text.startswith("constraints: dim b: 'idz' matches no tensor, node, module or operator")


@pytest.mark.slow
def test_layouts_are_refused_in_stages_of_one_device() -> None:
    staged = {"micro_batches": 2, "training": True}
    message = (
        "constraints: a layout over dp cuts nothing in stages of one device: give a mesh with pp "
        "and dp, and more devices"
    )
    for more in ({"parallel": "pp"}, {"parallel": "pp", "mesh": {"pp": 2}}, {"mesh": {"pp": 2}}):
        assert refused({"b": "ids.0"}, {"b": "dp"}, **staged, **more) == message


def test_stages_that_are_free_are_of_devices_enough_for_a_layout() -> None:
    model, batch = small_gpt()
    named = {"dims": {"b": "ids.0"}, "layout": {"b": "dp"}}
    program = partitioner.compile(
        model, batch, devices=2, training=True, micro_batches=2, constraints=named, time_limit_s=5
    )
    cuts = [{at.axes for at in placed.layouts.values()} for placed in products(program).values()]
    assert cuts
    assert all(("dp",) in axes for axes in cuts)
    assert program.verify()


def test_too_few_elements_and_unknown_axes_are_refused_by_name() -> None:
    text = refused({"heads": "*.q.weight.0"}, {"heads": "tp"}, devices=5)
    assert "layout heads = 'tp' (dim 0 of 'blocks.0.q.weight'): it has 4 elements in '/bl" in text
    text = refused({"b": "ids.0"}, {"b": "dq"}, devices=4, mesh={"dp": 2, "tp": 2})
    assert "a layout over 'dq'; the mesh has dp, tp" in text
    assert "leave it out with" in refused({"b": "ids.0"}, {"b": "dp"}, strategy="inter")


def transformer(name: str) -> tuple[nn.Module, dict[str, Tensor], str, str, str]:
    """A small model of Hugging Face, its inputs, and its batch, heads and hidden dims."""
    torch.manual_seed(0)
    ids = torch.randint(50, (4, 8))
    if name == "gpt2":
        sizes = {"n_layer": 1, "n_embd": 24, "n_head": 4, "vocab_size": 50, "n_positions": 16}
        config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, use_cache=False)
        model = transformers.GPT2LMHeadModel(config)
        return model, {"input_ids": ids}, "input_ids.0", "*.c_attn.weight.1", "*.c_fc.weight.1"
    if name == "vit":
        sizes = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 4}
        config = transformers.ViTConfig(**sizes, intermediate_size=40, image_size=16, patch_size=8)
        image = {"pixel_values": torch.randn(4, 3, 16, 16)}
        model = transformers.ViTModel(config)
        return model, image, "pixel_values.0", "*.q_proj.weight.0", "*.fc1.weight.0"
    sizes = {"num_layers": 1, "num_decoder_layers": 1, "d_model": 24, "num_heads": 4, "d_kv": 6}
    config = transformers.T5Config(**sizes, d_ff=40, vocab_size=50, use_cache=False)
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :6]}
    batch = "input_ids.0, decoder_input_ids.0"
    return transformers.T5Model(config), inputs, batch, "*.q.weight.0", "*.wi.weight.0"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("gpt2", 4), ("vit", 6), ("t5", 16)])
def test_transformers_are_laid_out_in_five_lines(name: str, count: int) -> None:
    model, inputs, batch, heads, hidden = transformer(name)
    named = {
        "dims": {"batch": batch, "heads": heads, "hidden": hidden},
        "layout": {"batch": "d", "heads": "m", "hidden": "m"},
    }
    program = partitioner.compile(
        *(model.eval(), inputs),
        devices=4,
        mesh={"d": 2, "m": 2},
        constraints=named,
        launches="native",
        time_limit_s=5,
    )
    assert program.verify()
    cuts = [{at.axes for at in placed.layouts.values()} for placed in products(program).values()]
    assert sum(axes == {("d",), ("m",)} for axes in cuts) == count
