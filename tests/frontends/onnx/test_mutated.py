"""Mutated models are read or refused on one line: no traceback, no hang."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mutated_models import mutate_bytes, mutate_model, small_models
from onnx import ModelProto

from partitioner import compile as compile_model
from partitioner import examples
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import PartitionerError

#: Mutated models of one kind.
COUNT = 1_000
#: Longest time to read a model.
MOST_S = 10
#: The models of the zoo that are small: mutations of the others mostly meet weights.
ZOO = ("tiny", "mlp", "llama")
#: Of the models that can be read, one in so many is planned and written too.
PLANNED = 10


@contextmanager
def within_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"a mutated model took over {MOST_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def base_models() -> list[ModelProto]:
    return [*small_models().values(), *map(examples.build, ZOO)]


def outcome(path: Path, number: int) -> str:
    """What came of a model: "refused", "read" or the traceback's error."""
    try:
        with within_limit():
            load_onnx(path)
            if number % PLANNED == 0:
                compile_model(path, devices=2, time_limit_s=1).save(
                    path.with_suffix(".partition"), force=True
                )
    except PartitionerError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except Exception as error:  # noqa: BLE001 - what the fuzzer looks for
        return f"{type(error).__name__}: {error}"
    return "read"


def run(folder: Path, make: Callable[[int], bytes]) -> None:
    path, faults, read = folder / "m.onnx", {}, 0
    for number in range(COUNT):
        path.write_bytes(make(number))
        came = outcome(path, number)
        read += came == "read"
        if came not in ("read", "refused"):
            faults[number] = came
    assert not faults
    assert read > COUNT // 50  # they are not all noise


@pytest.mark.slow
def test_models_with_mutated_structure(tmp_path: Path) -> None:
    bases = base_models()
    run(tmp_path, lambda i: mutate_model(bases[i % len(bases)], i).SerializeToString())


@pytest.mark.slow
def test_models_with_mutated_bytes(tmp_path: Path) -> None:
    bases = [model.SerializeToString() for model in base_models()]
    run(tmp_path, lambda i: mutate_bytes(bases[i % len(bases)], i))


@pytest.mark.parametrize("name", list(small_models()))
def test_the_models_before_mutation_are_valid(name: str) -> None:
    load_onnx(small_models()[name])
