"""Options given from Python: refused in one line, by the package's own errors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import partitioner
from partitioner import examples
from partitioner.api import compiler
from partitioner.api.verify.symbolic.proof import Proof, Refusal
from partitioner.backends.errors import BackendError
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.foundations.files import DirectoryError
from partitioner.frontends.errors import FrontendError
from partitioner.ir.errors import IRError, OptionError, PartitionerError
from partitioner.ir.mesh import DeviceMesh

MODEL = examples.build("mlp", layers=1, hidden=4, batch=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 2.5}, "devices is 2.5, not a whole number"),
        ({"devices": "2"}, "devices is '2', not a whole number"),
        ({"devices": True}, "devices is True, not a whole number"),
        ({"devices": 0}, "0 devices were asked for; at least 1"),
        ({"cluster": 5}, "cluster is 5; give a preset's name or a TOML file"),
        ({"cluster": resolve_cluster("2xideal"), "devices": 2.5}, "has 2 devices, not 2.5"),
        ({"mesh": {"b": 2.0}, "devices": 2}, "mesh axis 'b' has size 2.0, not a whole number"),
        ({"mesh": {"b": True}}, "mesh axis 'b' has size True, not a whole number"),
        ({"mesh": {"b": 0}}, "mesh axis 'b' has size 0, not a whole number above 0"),
        ({"mesh": {"a*b": 2}, "devices": 2}, r"mesh axis 'a\*b': axis names are letters"),
        ({"mesh": {1: 2}, "devices": 2}, "mesh axis 1: axis names are letters"),
        ({"mesh": "tp=2"}, "mesh is 'tp=2'; give sizes by axis"),
        ({"mesh": {"tp": 3}, "devices": 4}, r"mesh tp\(3\) = 3 != 4 devices"),
        ({"gap": -1}, "gap is -1, not a number of at least 0 and below 1"),
        ({"gap": 2}, "gap is 2, not a number"),
        ({"gap": math.nan}, "gap is nan, not a number"),
        ({"gap": "1%"}, "gap is '1%', not a number"),
        ({"time_limit_s": math.nan}, "time_limit_s is nan, not a number of seconds above 0"),
        ({"time_limit_s": -1}, "time_limit_s is -1, not"),
        ({"time_limit_s": math.inf}, "time_limit_s is inf, not"),
        ({"time_limit_s": 0}, "time_limit_s is 0, not"),
        ({"time_limit_s": None}, "time_limit_s is None, not"),
        ({"seed": -1}, "seed is -1, not a whole number of at least 0"),
        ({"seed": True}, "seed is True, not a whole number"),
        ({"seed": 0.5}, "seed is 0.5, not a whole number"),
        ({"solver": "nix"}, "solver 'nix' is not known; there are highs, cbc"),
        ({"solver": None}, "solver is None; give a name like 'highs'"),
        ({"objective": "speed"}, "objective 'speed' is not one of throughput, latency, memory"),
        ({"strategy": ["intra"]}, r"strategy \['intra'\] is not auto, intra, inter or copies"),
        ({"parallel": ["dp"]}, r"parallel is \['dp'\]; give a text, as 'dp' or 'dp\+tp'"),
        ({"parallel": "fsdp"}, r"did you mean 'zero3'\?"),
        ({"parallel": "ddp"}, r"did you mean 'dp'\?"),
        ({"cluster": "h100x4"}, r"did you mean '4xh100'\?"),
        ({"constraints": 5}, "constraints is 5; give Constraints, a Plan, a mapping, or a file"),
    ],
)
def test_an_option_that_means_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        partitioner.compile(MODEL, **options)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (5, "the model is an int; give the path of a file, an onnx.ModelProto or an nn.Module"),
        ("a\0b", "cannot be read .*null"),
        ("a" * 5000, "cannot be read .*too long"),
        ("\ud800.onnx", "cannot be read .*surrogates"),
    ],
)
def test_a_model_that_no_file_can_be(model: Any, message: str) -> None:
    with pytest.raises(FrontendError, match=message):
        partitioner.compile(model)


def test_a_torch_module_wants_example_inputs() -> None:
    module: Any = torch.nn.Linear(3, 3)
    with pytest.raises(OptionError, match="traced with example inputs: give example_inputs"):
        partitioner.compile(module, devices=2)


def test_a_torch_module_wants_tensors_and_an_instance() -> None:
    module: Any = torch.nn.Linear(3, 3)
    with pytest.raises(OptionError, match=r"holds a NumPy array: torch\.from_numpy"):
        partitioner.compile(module, np.ones((2, 3), np.float32), devices=2)
    with pytest.raises(OptionError, match="the class Linear: give an instance"):
        partitioner.compile(torch.nn.Linear, torch.ones(2, 3), devices=2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 4}, r"devices is 4; give a list, as \[4\]"),
        ({"clusters": "4xh100"}, r"clusters is '4xh100'; give a list, as \['4xh100'\]"),
        ({"devices": [2], "memory": "8GiB"}, r"memory is '8GiB'; give a list"),
        ({"devices": [2], "meshes": {"tp": 2}}, r"meshes is \{'tp': 2\}; give a list"),
    ],
)
def test_a_sweep_takes_lists(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        partitioner.sweep(MODEL, **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([np.ones((2, 4))], r"inputs is a list, not a dict of arrays by name \('x'\)"),
        ({"x": [[1.0] * 4] * 2}, r"input 'x' is a list, not a NumPy array; numpy\.asarray"),
        ({"x": torch.ones(2, 4)}, "input 'x' is a Tensor, not a NumPy array"),
    ],
)
def test_inputs_that_are_no_arrays(inputs: Any, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        partitioner.compile(MODEL, devices=2).run(inputs)


@pytest.mark.parametrize("memory", [True, -1, "much", [8], math.inf, math.nan, 0])
def test_a_memory_limit_that_is_none(memory: Any) -> None:
    with pytest.raises(PartitionerError, match="is not like '8GiB'"):
        partitioner.compile(MODEL, memory=memory)


def test_programs_that_are_proven_wrong_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Proof(2, Refusal(1, "node 'a'", "it reads 'b'", is_wrong=True))
    monkeypatch.setattr(compiler, "prove_programs", lambda *_: wrong)
    with pytest.warns(UserWarning, match=r"are WRONG: rank 1, node 'a': it reads 'b': .*report it"):
        result = partitioner.compile(MODEL, devices=2)
    assert result.summary["proof"] == wrong.line


def test_numpy_counts() -> None:
    result = partitioner.compile(
        MODEL, devices=np.int64(1), gap=np.float32(0.5), time_limit_s=np.int8(9)
    )
    assert len(result.cluster) == 1


def test_axes_of_any_mesh_have_names() -> None:
    with pytest.raises(IRError, match=r"mesh axis 'a\*b': axis names are letters, digits and _"):
        DeviceMesh((("a*b", 2),), (0, 1))


@pytest.mark.parametrize("target", ["a\0b", "a" * 5000])
def test_a_folder_that_cannot_be(target: str, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"cannot write .*(null byte|too long)"):
        partitioner.compile(MODEL).save(tmp_path / target)
    assert not list(tmp_path.iterdir())


def cluster_data(**changes: object) -> dict[str, Any]:
    return {**resolve_cluster("4xh100").to_data(), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (cluster_data(levels=None), "cluster '4xh100': levels is None, not a list"),
        (cluster_data(levels=5), "levels is 5, not a list"),
        (cluster_data(devices={"a": 1}), "devices is {'a': 1}, not a list"),
        (cluster_data(levels=[5]), "level is 5, not a table of figures"),
        (cluster_data(devices=[], levels=[]), "needs at least one device and one level"),
        *(
            (cluster_data(devices=[{**cluster_data()["devices"][0], "count": count}]), "count is ")
            for count in (10**9, 10**30, 1e30, True, "4", None, -1, [4])
        ),
        (
            cluster_data(devices=[{**cluster_data()["devices"][0], "count": 9000}] * 2),
            "has 18000 devices, more than 16384",
        ),
        (
            cluster_data(devices=[{**cluster_data()["devices"][0], "launch_s": 10**400}]),
            "launch_s of device 'h100' is 1000",
        ),
    ],
)
def test_cluster_data_that_is_none(data: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionerError, match=message):
        Cluster.from_data(data)
