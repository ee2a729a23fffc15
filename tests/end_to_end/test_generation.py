"""Decoders that generate: their caches lie where they are read, and stay there between calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import pytest

import partitioner
from helpers.onnx_files import gpt, onnx_models
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.load import read_directory
from partitioner.backends.onnx.serving import Session
from partitioner.cli.main import main
from partitioner.ir.errors import OptionError
from partitioner.ir.program import Programs

COUNT = 32  #: Tokens that are made.
LENGTHS: Mapping[gpt.Style, int] = {"written": COUNT, "grown": COUNT - 1}


def planned(style: gpt.Style, heads: int = 4, **options: Any) -> Compiled:
    """A plan of the small GPT for two devices, whose caches hold the tokens of these tests."""
    length = LENGTHS[style]
    model = gpt.gpt(style, length, heads=heads, width=8 * heads)
    dims = {"past": length} if style == "grown" else {}
    fixed = {"devices": 2, "feed": gpt.FEED, "dims": dims, "time_limit_s": 5}
    program = partitioner.compile(model, **{**fixed, **options})
    assert isinstance(program, Compiled)
    return program


def generated(session: Session, style: gpt.Style, first: int = 1) -> list[int]:
    """Greedy tokens of a session, whose calls neither take nor give caches."""
    tokens = [first]
    for given in gpt.calls(style, LENGTHS[style]):
        outputs = session.run({"input_ids": np.array([[tokens[-1]]]), **given})
        assert outputs.keys() == {"logits"}
        tokens.append(int(outputs["logits"][0, -1].argmax()))
    return tokens[1:]


def cache_bytes(programs: Programs) -> list[int]:
    """Bytes of the caches that each rank takes."""
    return [
        sum(
            p.types[name].nbytes for name, part in p.inputs.items() if part.whole.startswith("past")
        )
        for p in programs.ranks
    ]


@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("style", get_args(gpt.Style))
def test_tokens_are_those_of_the_whole_model(style: gpt.Style, heads: int) -> None:
    count = LENGTHS[style]
    model = gpt.gpt(style, count, heads=heads, width=8 * heads)
    wanted, _ = gpt.whole_model(model, style, count)
    with planned(style, heads, parallel="tp") as program:
        with program.session() as session:
            assert generated(session, style) == wanted
        of_rank, whole = (
            cache_bytes(program.programs),
            cache_bytes(planned(style, heads, devices=1).programs),
        )
        assert sum(of_rank) == whole[0]
        assert max(of_rank) == whole[0] * -(-heads // 2) // heads  # heads are not divided
        assert program.verify(seed=1)
        proof = program.verify(symbolic=True)
        assert proof, str(proof)


@pytest.mark.parametrize("style", get_args(gpt.Style))
def test_caches_lie_with_their_stage(style: gpt.Style) -> None:
    wanted, _ = gpt.whole_model(gpt.gpt(style, LENGTHS[style]), style, LENGTHS[style])
    layers = [{"nodes": [f"layer{device}.*"], "device": device} for device in range(2)]
    with planned(style, constraints={"pin": layers}) as program:
        assert len(set(cache_bytes(program.programs))) == 1  # one of two layers each
        assert program.verify(symbolic=True)
        with program.session() as session:
            assert generated(session, style) == wanted


def test_caches_that_are_given_take_the_place_of_those_that_are_held() -> None:
    style: gpt.Style = "written"
    with planned(style, strategy="inter") as program, program.session() as session:
        wanted = generated(session, style)
        types = session._whole[0].whole_inputs
        empty = {name: np.zeros(types[name].shape, np.float32) for name in gpt.held_names(types)}
        first = {"input_ids": np.array([[1]]), "position_ids": np.array([[0]])}
        for _ in range(2):
            logits = session.run({**first, **empty})["logits"]
            assert logits[0, -1].argmax() == wanted[0]
        # the next call reads what the one before wrote
        inputs = {"input_ids": np.array([wanted[:1]]), "position_ids": np.array([[1]])}
        assert session.run(inputs)["logits"][0, -1].argmax() == wanted[1]
        with pytest.raises(BackendError, match=r"has shape \(1, 4\), not"):
            session.run({**first, next(iter(empty)): np.zeros((1, 4), np.float32)})
        with pytest.raises(BackendError, match="a request waits for the results of the one before"):
            session.run_all([first, first])
        assert session.is_open


def test_a_session_feeds_what_it_is_told() -> None:
    """A plan that was not made for it has the heads of both where they are."""
    style: gpt.Style = "written"
    wanted, _ = gpt.whole_model(gpt.gpt(style, COUNT), style, COUNT)
    with planned(style, parallel="tp", feed=None) as program:
        with program.session(gpt.FEED) as session:
            assert generated(session, style) == wanted
        with pytest.raises(OptionError, match="the model has no result 'presents"):
            program.session({"presents.*": "past_key_values.*"})
    with planned(style, strategy="inter") as program, program.session({}) as session:
        assert session.feed == {}
        with pytest.raises(BackendError, match=r"'past_key_values\.0\.key' .* is missing"):
            session.run({"input_ids": np.array([[1]]), "position_ids": np.array([[0]])})


PINS = {"pin": [{"nodes": ["up"], "device": 0}, {"nodes": ["y"], "device": 1}]}


def looped() -> onnx.ModelProto:
    """A perceptron from x to y of one shape, and a result of y."""
    rng = np.random.default_rng(0)
    sizes = {"up": (32, 64), "down": (64, 32)}
    weights = {f"w_{n}": (rng.normal(size=s) / 8).astype(np.float32) for n, s in sizes.items()}
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w_up"], ["up"], name="up"),
        onnx.helper.make_node("Relu", ["up"], ["relu"], name="relu"),
        onnx.helper.make_node("MatMul", ["relu", "w_down"], ["y"], name="y"),
        onnx.helper.make_node("Neg", ["y"], ["z"], name="z"),
    ]
    types = {name: ("float32", [8, 32]) for name in "xyz"}
    outputs = {name: types[name] for name in "yz"}
    return onnx_models.model(nodes, {"x": types["x"]}, outputs, weights)


def test_a_result_that_lies_elsewhere_is_refused() -> None:
    apart = partitioner.compile(looped(), devices=2, constraints=PINS)
    with apart, pytest.raises(BackendError, match=r"feed y=x: rank 0 needs a part of the input"):
        apart.session({"y": "x"})


@pytest.mark.parametrize(
    "options",
    [
        {"constraints": PINS},
        {"parallel": "dp", "micro_batches": 2},
        {"memory": 12_000},  # in blocks
        {"strategy": "intra", "cluster": "2xcpu"},
    ],
    ids=str,
)
def test_a_result_is_made_where_the_input_lies(options: Mapping[str, Any]) -> None:
    program = partitioner.compile(looped(), devices=2, feed={"y": "x"}, **options)
    assert bool(program.plan.blocks) == ("memory" in options)
    assert program.verify(symbolic=True)
    x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    whole = onnxruntime.InferenceSession(looped().SerializeToString())
    with program, program.session() as session:
        for given in ({"x": x}, {}, {}):
            x, wanted = whole.run(None, {"x": x})
            found = session.run(given)
            assert found.keys() == {"z"}
            np.testing.assert_allclose(found["z"], wanted, rtol=1e-4, atol=1e-5)


def test_copies_hold_no_results() -> None:
    model = examples.build("mlp", layers=2)
    with pytest.raises(
        partitioner.PartitionerError, match=r"whole copies serve .* 'y/feed' is kept"
    ):
        partitioner.compile(model, devices=2, strategy="copies", feed={"y": "x"})
    copies = partitioner.compile(model, devices=2, strategy="copies")
    with copies, pytest.raises(BackendError, match="each holds its own results"):
        copies.session({"y": "x"})


def test_pairs_that_cannot_be_are_refused() -> None:
    def refused(message: str, feed: Mapping[str, str]) -> None:
        with pytest.raises(OptionError, match=message):
            partitioner.compile(gpt.gpt("written"), devices=2, feed=feed)

    refused("cannot become an input of type", {"logits": "past_key_values.0.key"})
    refused("no input; did you mean", {"present.*": "past.*"})
    relu = onnx.helper.make_node("Relu", ["x"], ["y"])
    two = {"x": ("float32", [2]), "z": ("float32", [2])}
    model = onnx_models.model([relu], two, {"y": ("float32", [2])})
    with partitioner.compile(model, devices=2, feed={"y": "z"}) as program:  # read by nobody else
        assert program.verify()
        assert program.verify(symbolic=True)


def test_the_command_makes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, _ = gpt.whole_model(gpt.gpt("grown"), "grown", COUNT)
    onnx.save(gpt.gpt("grown"), tmp_path / "gpt.onnx")
    folder, file = str(tmp_path / "gpt.partition"), tmp_path / "made.npz"
    feed = ["--feed", "present.*=past_key_values.*"]
    made = ["--devices", "2", "--parallel", "tp", "--dim", f"past={COUNT}", *feed]
    assert main([str(tmp_path / "gpt.onnx"), *made, "-o", folder, "--quiet"]) == 0
    request = json.loads((Path(folder) / "request.json").read_text())
    assert request["feed"] == gpt.FEED
    assert read_directory(Path(folder))[0].fed.keys() == {
        f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")
    }
    assert partitioner.load(folder).verify(symbolic=True)
    asked = ["run", folder, "--prompt", f"1,{wanted[0]}", "--until", "8", "--outputs", str(file)]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert f"tokens: {', '.join(map(str, wanted[1:9]))}\n" in text
    assert "on their ranks: 4 results" in text
    with np.load(file) as arrays:
        assert arrays["tokens"].tolist() == [wanted[1:9]]
        assert sorted(arrays.files) == ["logits", "tokens"]
    # of one token, too, the mask shows the whole prompt
    prompt = ",".join(map(str, [1, *wanted[:3]]))
    assert main(["run", folder, "--prompt", prompt, "--until", "1"]) == 0
    assert f"tokens: {wanted[3]}\n" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mlp.partition"
    partitioner.compile(examples.build("mlp", layers=2), devices=2).save(folder)

    def refused(message: str, *options: str) -> None:
        assert main(["run", str(folder), *options]) != 0
        assert message in " ".join(capsys.readouterr().err.split())

    refused("no result is fed back: give --feed", "--until", "3")
    refused("--feed is of --until", "--feed", "y=x")
    refused("leave --requests out", "--until", "3", "--requests", "2")
    refused("partition the model with this feed", "--until", "3", "--feed", "y=x")
    program = partitioner.compile(examples.build("mlp", layers=2), devices=2, feed={"y": "x"})
    program.save(folder, force=True)
    refused("no input input_ids and result logits", "--until", "3", "--prompt", "1")
    assert main(["run", str(folder), "--until", "3"]) == 0
    assert "3 calls" in capsys.readouterr().out
