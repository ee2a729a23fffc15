"""Plans that are looked at without their model; modules that only the user names."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx.helper import make_node as node

import partitioner
from helpers import factories
from helpers.onnx_files import onnx_models as om
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.reload import look
from partitioner.api.verify.compare import Verification
from partitioner.backends.errors import BackendError
from partitioner.backends.optimization import OPTIMIZATIONS
from partitioner.cli.main import main
from partitioner.foundations.files import FileError, ResultError
from partitioner.ir.errors import OptionError
from partitioner.run.local import read_inputs, write_outputs


@pytest.fixture(scope="module")
def onnx_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looked")
    model = examples.build("mlp", layers=2, hidden=48, batch=4)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    result = partitioner.compile(folder / "m.onnx", cluster="2xideal", strategy="intra")
    return result.save(folder / "m.partition")


@pytest.fixture
def moved(onnx_plan: Path, tmp_path: Path) -> Path:
    """The plan far from its model."""
    return Path(shutil.copytree(onnx_plan, tmp_path / "far" / "m.partition"))


@pytest.fixture(scope="module")
def from_factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a module, that says that it is from a factory which does not exist."""
    result = partitioner.compile(
        factories.classifier(), factories.batch(), cluster="2xideal", strategy="intra"
    )
    folder = result.save(tmp_path_factory.mktemp("factory") / "f.partition", plan_only=True)
    request = json.loads((folder / "request.json").read_text())
    (folder / "request.json").write_text(json.dumps({**request, "factory": "no_such:build"}))
    return folder


def text_of(result: Compiled, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    result.show(everything=True)
    result.explain()
    return capsys.readouterr().out


def test_the_stored_graph_tells_what_the_model_tells(
    onnx_plan: Path, moved: Path, from_factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = look(moved)
    assert looked.graph.digest == partitioner.load(onnx_plan).graph.digest
    assert text_of(looked, capsys) == text_of(partitioner.load(onnx_plan), capsys)
    again = partitioner.load(from_factory, factories.classifier(), factories.batch())
    assert text_of(look(from_factory), capsys) == text_of(again, capsys)
    for seed in (0, 5):
        drawn = looked.model.random_inputs(seed)
        for name, array in partitioner.load(onnx_plan).model.random_inputs(seed).items():
            np.testing.assert_array_equal(array, drawn[name])


def test_bodies_and_names_of_outputs_are_kept(tmp_path: Path) -> None:
    """FLOPs of bodies are no part of the graph's digest, but of the plan's cost."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((64, 64)).astype(np.float32) for i in range(2)}
    result = {"o": ("float32", [8, 64])}
    branches = {
        f"{name}_branch": om.body([node("MatMul", ["x", f"w{i}"], ["o"])], {}, result)
        for i, name in enumerate(("then", "else"))
    }
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("If", ["c"], ["i"], **branches),
        node("MatMul", ["i", "w0"], ["y"]),
        node("NonZero", ["y"], ["n"]),
    ]
    outputs = {name: ("float32", [8, 64]) for name in "xy"} | {"n": ("int64", [2, None])}
    model = om.model(
        *(nodes, {"x": ("float32", [8, 64])}, outputs),
        {**weights, "zero": np.array(0, np.float32)},
    )
    result = partitioner.compile(model, devices=2, cluster="ideal", shapes={"n": (2, 512)})
    folder = result.save(tmp_path / "p")
    looked = look(folder)
    assert looked.warnings == ()
    assert looked.evaluation == result.evaluation
    assert looked.graph.output_names == result.graph.output_names == {"x_output": "x"}
    assert looked.graph.bounded == result.graph.bounded == {"n"}
    data = json.loads((folder / "graph.json").read_text())
    for each in data["graph"]["nodes"]:
        for attribute in each.get("attrs", {}).values():
            if isinstance(attribute, dict) and "opaque" in attribute:
                attribute["opaque"][2] = float("nan")
    (folder / "graph.json").write_text(json.dumps(data))
    with pytest.raises(ResultError, match="NaN is not a number of FLOPs"):
        look(folder)


class OddNames(torch.nn.Module):
    """Inputs whose names are those of arguments of `numpy.savez`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, file: torch.Tensor, allow_pickle: torch.Tensor) -> torch.Tensor:
        return self.layer(file) * allow_pickle


def test_example_inputs_of_any_name_are_kept(tmp_path: Path) -> None:
    inputs = torch.randn(2, 4), torch.randn(2, 4).bfloat16()
    result = partitioner.compile(OddNames(), inputs, devices=2, cluster="ideal")
    folder = result.save(tmp_path / "p")
    types = result.model.input_types
    kept = read_inputs(folder / "inputs.npz", types)
    assert {name: array.dtype.name for name, array in kept.items()} == {
        "file": "float32",
        "allow_pickle": "bfloat16",
    }
    np.testing.assert_array_equal(kept["file"], inputs[0].numpy())
    write_outputs(tmp_path / "out.npz", kept)
    with np.load(tmp_path / "out.npz") as written:
        np.testing.assert_array_equal(written["file"], kept["file"])


def test_a_plan_that_was_moved(moved: Path, onnx_plan: Path) -> None:
    with pytest.raises(ResultError, match=r"not at .*m\.onnx; put it there, name it \(part"):
        partitioner.load(moved)
    with pytest.raises(ResultError, match=r"^other\.onnx: no such file$"):
        partitioner.load(moved, model="other.onnx")
    named = partitioner.load(moved, model=onnx_plan.parent / "m.onnx")
    assert named.verify_written(moved)
    with pytest.raises(ResultError, match=r"was read without its model: partitioner\.load"):
        look(moved).run({})


def test_a_factory_is_named_by_the_user(
    from_factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = (
        r"its module came from no_such:build, which is imported only if you name it: partition "
        r"verify \S+ --module no_such:build"
    )
    with pytest.raises(ResultError, match=message):
        partitioner.load(from_factory)
    with pytest.raises(OptionError, match=r"module is 'net'; give package\.module:factory"):
        partitioner.load(from_factory, "net")
    with pytest.raises(OptionError, match=r"model is 'm\.onnx'; give a \.pt2 or config\.json file"):
        partitioner.load(from_factory, model="m.onnx")
    with pytest.raises(OptionError, match="model and module are given: give one of them"):
        partitioner.load(from_factory, "a.b:c", model="m.pt2")
    assert main(["show", str(from_factory)]) == 0
    assert capsys.readouterr().err == ""


def test_a_folder_of_an_earlier_version(
    moved: Path, onnx_plan: Path, from_factory: Path, tmp_path: Path
) -> None:
    (moved / "graph.json").unlink()
    with pytest.raises(ResultError, match=r"its model is not at .*m\.onnx"):
        look(moved)
    shutil.copy(onnx_plan.parent / "m.onnx", moved.parent)
    assert look(moved).graph.digest == partitioner.load(onnx_plan).graph.digest
    old = Path(shutil.copytree(from_factory, tmp_path / "old"))
    (old / "graph.json").unlink()
    with pytest.raises(ResultError, match=r"saved by an earlier version, without graph\.json: "):
        look(old)


def test_a_graph_that_was_changed(moved: Path) -> None:
    path = moved / "graph.json"
    data = json.loads(path.read_text())
    data["graph"]["nodes"][0]["name"] += "x"
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError, match=r"graph\.json is not of the graph that request\.json is"):
        look(moved)
    path.write_text(json.dumps({**data, "version": 9}))
    with pytest.raises(ResultError, match=r"graph\.json is version 9, not 1"):
        look(moved)
    path.write_text(json.dumps({**data, "graph": {}}))
    with pytest.raises(ResultError, match=r"graph\.json: the graph has no 'name'"):
        look(moved)
    path.write_text(json.dumps({**data, "ranges": {"x": 3}}))
    with pytest.raises(ResultError, match=r"graph\.json is malformed"):
        look(moved)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: os.truncate(file, 100), r"rank0\.weights has 100 bytes, not \d+: it is not"),
        (lambda file: os.truncate(file, 2**30), r"rank0\.weights has more than \d+ bytes"),
        (lambda file: flip(file, 77), r"rank0\.onnx or rank0\.weights is not as it was written"),
        (lambda file: flip(file.with_suffix(".onnx"), 40), r"rank ?0"),
        (lambda file: file.unlink(), r"rank0\.weights: No such file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), r"rank0\.weights: not a regular file"),
    ],
)  # fmt: skip
def test_rank_files_that_are_damaged(moved: Path, spoil: object, message: str) -> None:
    from partitioner.backends.onnx.running.simulator import Simulator

    assert callable(spoil)
    spoil(moved / "rank0.weights")
    with pytest.raises(BackendError, match=message):
        Simulator(moved)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 8
    file.write_bytes(data)


def test_weights_that_lie_elsewhere(moved: Path) -> None:
    import onnx

    from partitioner.backends.onnx.running.simulator import Simulator

    model = onnx.load_from_string((moved / "rank0.onnx").read_bytes())
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../m.onnx" if entry.key == "location" else entry.value
    (moved / "rank0.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BackendError, match=r"lies in '\.\./m\.onnx' at '0', not in rank0\.weights"):
        Simulator(moved)


def test_the_report_is_not_written_through_a_link(
    moved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = moved.parent / "mine"
    outside.write_text("mine")
    (moved / "report.html").unlink()
    (moved / "report.html").symlink_to(outside)
    assert main(["report", str(moved)]) == 1
    assert "report.html: it is a link; remove it, or name another file" in capsys.readouterr().err
    assert main(["run", str(moved), "--profile"]) == 1
    assert outside.read_text() == "mine"


def test_levels_of_optimization(onnx_plan: Path) -> None:
    with partitioner.load(onnx_plan) as result:
        inputs = result.model.random_inputs(0)
        whole = result.run(inputs)
        for level in OPTIMIZATIONS:
            verification = result.verify(optimization=level)
            assert isinstance(verification, Verification)
            assert verification, str(verification)
            assert str(verification).endswith(f"optimization level {level}")
            (found,) = result.run(inputs, optimization=level).values()
            np.testing.assert_allclose(found, *whole.values(), rtol=1e-4)
        assert result.verify().optimization == "all"
        with pytest.raises(OptionError, match="optimization 'most' is not one of disable, basic"):
            result.run(inputs, optimization="most")  # type: ignore[arg-type]


def test_a_module_has_no_levels(from_factory: Path) -> None:
    result = partitioner.load(from_factory, factories.classifier(), factories.batch())
    with pytest.raises(OptionError, match="that is of ONNX Runtime, the plan is of a module"):
        result.verify(optimization="basic")


def test_files_that_are_no_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "c.toml")
    (tmp_path / "c.json").symlink_to("/dev/zero")
    (tmp_path / "s.csv").touch()
    os.truncate(tmp_path / "s.csv", 2**40)
    (tmp_path / "m.onnx").write_bytes(examples.build("mlp", layers=1).SerializeToString())
    plan = [str(tmp_path / "m.onnx"), "--plan-only", "-q", "-o", str(tmp_path / "p")]
    for option, message in (
        (["--cluster", str(tmp_path / "c.toml")], "c.toml: not a regular file"),
        (["--constraints", str(tmp_path / "c.toml")], "c.toml: not a regular file"),
        (["--constraints", str(tmp_path / "c.json")], "c.json: not a regular file"),
    ):
        assert main([*plan, "--devices", "2", *option]) == 1, option
        assert message in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
    assert main(["schedule", str(tmp_path / "s.csv")]) == 1
    assert "s.csv: 1099511627776 bytes, more than 268435456" in capsys.readouterr().err


def test_a_link_is_no_place_for_a_file(tmp_path: Path) -> None:
    from partitioner.foundations.files import check_no_link

    (tmp_path / "link").symlink_to("x")
    with pytest.raises(FileError, match="link: it is a link; remove it"):
        check_no_link(tmp_path / "link")


def test_operators_of_an_exported_program() -> None:
    from partitioner.backends.torch.files.archive import may_call

    assert may_call("aten", "linear", "default")
    assert may_call("aten", "add", "Tensor")
    assert may_call("partitioner", "experts", "default")
    for kept in ("numpy_T", "avg_pool1d", "kthvalue", "reflection_pad2d", "_cdist_backward"):
        assert may_call("aten", kept, "default"), kept
    for refused in ("from_file", "save", "set_", "fbgemm_linear_fp16_weight", "resize_"):
        assert not may_call("aten", refused, "default")
    assert not may_call("_c10d_functional", "broadcast", "default")
    assert not may_call("prims", "device_put", "default")


class Kept(torch.nn.Module):
    """Operators that export keeps, and that traces of training keep whole."""

    def __init__(self) -> None:
        super().__init__()
        plain = torch.nn.Linear(6, 6)
        self.layer = torch.nn.utils.parametrizations.weight_norm(plain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        padded = torch.nn.functional.pad(y[None, None], (1, 1, 1, 1), mode="reflect")
        pooled = torch.nn.functional.avg_pool1d(y[None], 2)
        least = torch.kthvalue(y.T, 2).values
        far = torch.cdist(y, y + 1)
        return padded.square().mean() + pooled.sum() + least.sum() + far.sum()


@pytest.mark.slow
def test_operators_that_export_and_traces_keep_are_loaded(tmp_path: Path) -> None:
    module, example = Kept(), (torch.rand(4, 6),)
    torch.export.save(torch.export.export(module, example, strict=False), tmp_path / "m.pt2")
    options: Any = {"devices": 2, "cluster": "ideal"}
    assert partitioner.compile(tmp_path / "m.pt2", **options).verify()
    program = partitioner.compile(module, example, training=True, **options)
    assert program.verify_written(program.save(tmp_path / "p"))


def test_no_operator_of_the_list_takes_memory_as_it_is() -> None:
    """Files, storages and packed weights are given to operators by arguments of their own types."""
    from partitioner.backends.torch.files.archive import may_call

    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten" or not may_call(space, packet, overload or "default"):
            continue
        schema = torch._C._get_operation_overload(f"aten::{packet}", overload)
        if schema is None:
            continue
        found = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
        types = {str(argument.type) for argument in found.arguments}
        assert not types & {"Storage", "__torch__.torch.classes", "Stream"}, name
        assert not any("file" in argument.name for argument in found.arguments), name
