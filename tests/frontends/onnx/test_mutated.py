"""Mutated files through the command line: planned, verified or refused on one line.

    python tests/benchmarks/fuzz.py structure --count 20000

runs more of them.
"""

from pathlib import Path

import pytest

from helpers.drawn.fuzzing import GOOD, KINDS, Sample, Table, fuzz, run_sample
from helpers.onnx_files.mutated_models import small_models
from partitioner.frontends.onnx.load import load_onnx

#: Samples of one kind.
COUNT = 1_000


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "bytes" else pytest.mark.sweep)
        for kind in sorted(KINDS)
    ],
)
def test_mutated_files(kind: str) -> None:
    table = fuzz(kind, range(COUNT), print)
    print(table)
    assert not table.faults
    assert table.counts["equal"] > COUNT // 50  # they are not all noise


@pytest.mark.parametrize("name", list(small_models()))
def test_the_models_before_mutation_are_valid(name: str) -> None:
    load_onnx(small_models()[name])


def test_the_end_of_a_sample(tmp_path: Path) -> None:
    """A right model is planned and verified, and a wrong file is refused."""
    model = small_models()["mlp"].SerializeToString()
    plan = ("m.onnx", "--devices", "2", "-o", "out", "-q")
    commands = (plan, ("verify", "out"))
    assert run_sample(Sample({"m.onnx": model}, commands), tmp_path / "a") == ("equal", "")
    end, text = run_sample(Sample({"m.onnx": model[:-9]}, commands), tmp_path / "b")
    assert end == "refused"
    assert text.startswith("partition: m.onnx: ")


def test_faults_are_counted() -> None:
    table = Table()
    for number, end in enumerate((*GOOD, "traceback", "traceback")):
        table.add(number, end, "text")
    assert set(table.faults.values()) == {("traceback", "text")}
    assert "2 traceback" in str(table)
    assert "0 hang" in str(table)
