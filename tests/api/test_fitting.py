"""`partition fit`: the smallest clusters of cards that hold a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import OptionError, PartitionerError, examples
from partitioner.api.fitting import CLASSES, CLASSES_IN_TRAINING, Fitted
from partitioner.cli.main import main
from partitioner.cost_model.cluster import presets
from partitioner.cost_model.cluster.resolve import resolve_cluster

#: float32 elements of a square layer of 4 GiB.
WIDTH = 2**15


class Layers(nn.Module):
    """Square layers, which return their loss in training."""

    def __init__(self, width: int, count: int, *, loss: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.square().mean() if self.loss else y


def large(count: int, *, loss: bool = False) -> tuple[nn.Module, Tensor]:
    """Layers of 4 GiB each, without contents, and example inputs."""
    with torch.device("meta"):
        return Layers(WIDTH, count, loss=loss), torch.ones(2, WIDTH)


def test_a_small_model_fits_one_of_each_card_as_its_plan_there_says() -> None:
    module, x = Layers(64, 3), torch.ones(8, 64)
    fitted = partitioner.fit(module, x, cards=["rtx-3060", "h100"])
    assert [card.card for card in fitted.cards] == ["rtx-3060", "h100"]
    for card in fitted.cards:
        assert card.holds is not None
        assert card.not_held == ()
        program = partitioner.compile(module, x, cluster=f"1x{card.card}")
        assert card.holds.cluster == f"1x{card.card}"
        assert card.holds.step_s == pytest.approx(program.evaluation.step_s)
        assert card.holds.peak_bytes == program.evaluation.needed_bytes[0]
        assert card.holds.limit_bytes == program.cluster.devices[0].memory_bytes
        assert sum(card.holds.bytes.values()) == card.holds.peak_bytes
    assert tuple(fitted.bytes) == CLASSES
    assert fitted.bytes["weights"] == 3 * 64 * 64 * 4
    assert json.loads(json.dumps(fitted.data)) == json.loads(json.dumps(fitted.data))


def test_where_the_count_of_bytes_forbids_one_card_two_hold_it_by_a_plan() -> None:
    module, x = large(4)
    (card,) = partitioner.fit(module, x, cards=["rtx-3060"], time_limit_s=30).cards
    (one,) = card.not_held
    assert (one.devices, one.proven) == (1, True)
    assert "any plan holds 16 GiB at least" in one.why
    assert card.holds is not None
    assert (card.holds.cluster, card.holds.devices) == ("2xrtx-3060", 2)
    assert card.holds.peak_bytes <= card.holds.limit_bytes == 12 * 10**9
    assert sum(card.holds.bytes.values()) == card.holds.peak_bytes
    program = partitioner.compile(module, x, cluster="2xrtx-3060")
    assert program.evaluation.fits_exactly


def test_what_no_machine_at_home_holds_is_refused_by_the_count() -> None:
    fitted = partitioner.fit(*large(40), cards=["rtx-3060"])
    (card,) = fitted.cards
    assert card.holds is None
    assert [(one.devices, one.proven) for one in card.not_held] == [(1, True), (2, True), (4, True)]
    assert "rtx-3060: no plan fits on 4xrtx-3060, any plan holds 160 GiB at least" in str(fitted)


def test_datacentres_have_machines_of_eight_and_homes_one_machine() -> None:
    with torch.device("meta"):
        module, x = Layers(2**17, 90), torch.ones(2, 2**17)
    cards = partitioner.fit(module, x, cards=["h100", "rtx-4090"]).cards
    clusters = [[one.cluster for one in card.not_held] for card in cards]
    assert clusters == [
        ["1xh100", "2xh100", "4xh100", "8xh100", "2x8xh100", "4x8xh100", "8x8xh100"],
        ["1xrtx-4090", "2xrtx-4090", "4xrtx-4090"],
    ]
    assert all(one.proven for card in cards for one in card.not_held)


def test_training_counts_gradients_and_the_state_of_the_optimizer() -> None:
    module, x = Layers(256, 4, loss=True), torch.ones(8, 256)
    weights = 4 * 256 * 256 * 4
    fitted = partitioner.fit(module, x, training=True, optimizer="adam", cards=["h100"])
    assert tuple(fitted.bytes) == CLASSES_IN_TRAINING
    assert fitted.turn == "step"
    assert fitted.end_bytes["gradients"] == weights
    assert fitted.end_bytes["parameters"] == fitted.bytes["parameters"] == weights
    assert fitted.bytes["optimizer's state"] == 2 * weights
    (card,) = fitted.cards
    assert card.holds is not None
    assert sum(fitted.bytes.values()) == card.holds.peak_bytes
    assert "gradients" in str(fitted)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A configuration of a mixture of experts."""
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_all_experts_count(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    args = ["fit", str(mixture), "--dim", "length=16", "--cards", "rtx-3060", "--json", "-q"]
    assert main(args) == 0
    data = json.loads(capsys.readouterr().out)
    experts, attention = 8 * 3 * 64 * 128, (64 + 2 * 32 + 64) * 64
    layer = experts + attention + 8 * 64 + 2 * 64
    floats = layer + 64 + 2 * 256 * 64
    assert data["bytes"]["weights"] >= 4 * floats
    assert data["bytes"]["weights"] < 4 * floats + 1024  # and frequencies of angles


def test_the_command_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=32, batch=4), tmp_path / "m.onnx")
    assert main(["fit", str(tmp_path / "m.onnx"), "--cards", "rtx-4090,a100", "-q"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("m: a whole request on one device takes ")
    assert "weights" in text
    assert "1xrtx-4090" in text
    assert "1xa100-80g" in text  # the full name of an alias
    assert "not proven" not in text


def test_cards_of_figures_are_items_of_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=32, batch=4), tmp_path / "m.onnx")
    rates = "bandwidth=1TB/s,float32=30TFLOPS,float16=60TFLOPS,link=30GB/s"
    cards = f"(name=mine,memory=4GB,{rates}),l4"
    assert main(["fit", str(tmp_path / "m.onnx"), "--cards", cards, "-q"]) == 0
    text = capsys.readouterr().out
    assert "1xmine" in text
    assert "1xl4" in text
    assert main(["fit", str(tmp_path / "m.onnx"), "--cards", "(memory=4GB)", "-q"]) == 2
    assert "gives no bandwidth" in capsys.readouterr().err


def test_without_cards_those_of_usual_sizes_are_tried() -> None:
    fitted = partitioner.fit(Layers(8, 1), torch.ones(2, 8))
    assert isinstance(fitted, Fitted)
    assert tuple(card.card for card in fitted.cards) == presets.usual_cards()
    sizes = {resolve_cluster(f"1x{card}").devices[0].memory_bytes for card in presets.usual_cards()}
    assert len(sizes) >= 8


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--cards", "rtx-409"], 2, "card 'rtx-409' is no preset of one; .*did you mean"),
        (["--cards", "4xh100"], 2, "card '4xh100' is no preset of one"),
        (["--cards", "cpu"], 2, "card 'cpu' is no preset of one"),
        (["--training"], 2, "--training is for PyTorch modules"),
        (["--time-limit", "0"], 2, "'0' is not a number of seconds above 0"),
        (["--dim", "batch=2"], 1, "batch"),
        (["--batch", "2"], 1, "batch"),
        (
            ["--batch", "2", "--dim", "batch=3"],
            2,
            "batch is 2, and dims has a batch of 3: give one",
        ),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=32, batch=4), tmp_path / "m.onnx")
    assert main(["fit", str(tmp_path / "m.onnx"), "-q", *args]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_batch_is_the_dim_of_that_name(mixture: Path) -> None:
    pytest.importorskip("transformers")
    one, other = (
        partitioner.fit(mixture, cards=["h100"], dims={"length": 8, **dims}, **batch)
        for dims, batch in (({"batch": 6}, {}), ({}, {"batch": 6}))
    )
    assert one.data == other.data
    assert one.bytes["activations"] > 0


def test_cards_are_a_list() -> None:
    with pytest.raises(OptionError, match=r"cards is 'h100'; give a list, as \['h100'\]"):
        partitioner.fit(Layers(8, 1), torch.ones(2, 8), cards="h100")
    with pytest.raises(PartitionerError, match=r"none.onnx: cannot be read"):
        partitioner.fit("none.onnx")


def test_a_kind_that_few_cards_cannot_have_is_tried_on_more() -> None:
    """Tensors are cut over two cards at least, whatever one holds."""
    module, x = Layers(64, 2), torch.ones(8, 64)
    (card,) = partitioner.fit(module, x, parallel="tp", cards=["h100"]).cards
    assert card.holds is not None
    assert card.holds.devices in (1, 2)


def test_a_model_without_operators_takes_nothing() -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    graph = onnx.helper.make_graph([], "nothing", [x], [x])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    fitted = partitioner.fit(model, cards=["h100"])
    (card,) = fitted.cards
    assert card.holds is not None
    assert "1xh100" in str(fitted)
