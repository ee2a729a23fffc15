"""Every model x device count x strategy: planned, emitted, run on all ranks, proven equal."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import partitioner
from helpers.onnx_files.rank_files import assert_rank_files_run
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxRanks

Models = Callable[[str], Path]
QUICK = ("mlp", "tiny", "llama")
SLOW = (
    "alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
EXPORTED = ("gpt2", "llama", "bert", "vit", "t5", "mixtral")
#: Its classifier's weight is reshaped by a node; folding that lets ONNX Runtime pack the weight,
#: which changes last bits on one device too.
PACKED = ("inception_v1",)
STRATEGIES = ("auto", "intra", "inter")


def check(path: Path, devices: int, **options: object) -> Compiled:
    """Compile and verify; inter plans cut nothing, so they must be bit-identical."""
    result = partitioner.compile(path, devices=devices, time_limit_s=5, **options)  # type: ignore[arg-type]
    assert isinstance(result.ranks, OnnxRanks)
    assert_rank_files_run(result.ranks.folder)
    found = result.verify(seed=1)
    assert found.equal, str(found)
    assert result.plan.certificate is not None
    if result.plan.certificate.strategy == "inter" and path.stem not in PACKED:
        found = result.verify(seed=1, optimization="disable")  # no fusion that a cut may break
        assert all(output.identical for output in found.outputs), str(found)
    return result


def _is_split(summary: Mapping[str, object]) -> bool:
    share = summary["sharded_flops_share"]
    assert isinstance(share, float)
    return share >= 0.9


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", QUICK)
def test_example(zoo: Models, name: str, devices: int, strategy: str) -> None:
    check(zoo(name), devices, strategy=strategy)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", QUICK)
def test_example_sharded_on_ideal(zoo: Models, name: str, devices: int) -> None:
    result = check(zoo(name), devices, strategy="intra", cluster=f"{devices}xideal")
    assert _is_split(result.summary)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", SLOW)
def test_zoo(zoo: Models, name: str, devices: int, strategy: str) -> None:
    check(zoo(name), devices, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", SLOW)
def test_zoo_sharded_on_ideal(zoo: Models, name: str, devices: int) -> None:
    result = check(zoo(name), devices, strategy="intra", cluster=f"{devices}xideal")
    assert _is_split(result.summary)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", EXPORTED)
def test_exported(exported: Models, name: str, devices: int, strategy: str) -> None:
    check(exported(name), devices, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_sharded_on_ideal(exported: Models, name: str, devices: int) -> None:
    result = check(exported(name), devices, strategy="intra", cluster=f"{devices}xideal")
    assert _is_split(result.summary)
