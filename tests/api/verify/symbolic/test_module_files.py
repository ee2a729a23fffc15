"""Saved programs of PyTorch modules are proven from their files, and spoilt files are refused."""

import itertools
import json
import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

import partitioner
from helpers.modules.transformer_block import Block
from helpers.plans.mutated_graphs import graph_mutants
from helpers.plans.mutated_programs import mutants
from partitioner.api.verify.symbolic.module_files import read_programs
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.errors import BackendError
from partitioner.backends.header import Origin
from partitioner.backends.torch.files.rank_files import CPU, write_phases
from partitioner.backends.torch.graphs.phases import emit_phases
from partitioner.cli.main import main
from partitioner.ir.graph import Graph
from partitioner.ir.program import Programs


class Net(nn.Module):
    """Convolutions, one with a buffer that it writes, and a mask that devices send each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = self.second(torch.where(x > 0, x, x * 0.1))
        return self.head(fn.max_pool2d(x, 2).mean((2, 3))).pow(2).mean()


class Words(nn.Module):
    """Tied embeddings, dropout and a mean over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = fn.dropout(self.mix(self.embedding(ids)), 0.1, self.training)
        scores = x @ self.embedding.weight.T
        return fn.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Mean(nn.Module):
    """The mean of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def block() -> tuple[nn.Module, Tensor]:
    return Block(), torch.randn(4, 8, 16)


def net() -> tuple[nn.Module, Tensor]:
    return Net(), torch.randn(4, 3, 8, 8)


def words() -> tuple[nn.Module, Tensor]:
    return Words(), torch.randint(0, 32, (5, 8))


def layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), Mean()), torch.randn(5, 8)


def planned(make: Any, devices: int, **options: Any) -> Any:
    module, example = make()
    options = {"cluster": f"{devices}xideal", "training": True, "time_limit_s": 5, **options}
    return partitioner.compile(module, (example,), devices=devices, **options)


@pytest.mark.parametrize(
    ("make", "devices", "options"),
    [
        pytest.param(block, 2, {"parallel": "zero3"}, marks=pytest.mark.slow),
        pytest.param(block, 2, {"parallel": "zero1"}, marks=pytest.mark.slow),
        (block, 2, {"parallel": "tp", "training": False}),
        pytest.param(block, 2, {"parallel": "zero3", "micro_batches": 2}, marks=pytest.mark.slow),
        (block, 2, {"parallel": "pp", "micro_batches": 4}),
        pytest.param(net, 3, {"strategy": "intra"}, marks=pytest.mark.slow),
        (net, 4, {"strategy": "inter"}),
        pytest.param(words, 2, {"parallel": "tp"}, marks=pytest.mark.slow),
        (words, 3, {"strategy": "intra", "training": False}),
        pytest.param(block, 4, {"parallel": "dp+tp"}, marks=pytest.mark.slow),
        pytest.param(block, 4, {"parallel": "pp+tp", "micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param(net, 2, {"parallel": "pp", "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param(net, 3, {"parallel": "dp"}, marks=pytest.mark.slow),
        pytest.param(words, 2, {"parallel": "dp"}, marks=pytest.mark.slow),
    ],
)
def test_a_saved_program_is_proven_without_its_module(
    make: Any,
    devices: int,
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned(make, devices, **options).save(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out"), "--symbolic"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"proven: {devices} ranks compute the whole model\n")
    assert "as graph.json has it" in shown
    assert ("run once each and share the batch" in shown) == ("micro_batches" in options)


def test_a_smaller_last_micro_batch_is_proven_with_the_module(tmp_path: Path) -> None:
    compiled = planned(layers, 2, parallel="pp", micro_batches=3)
    compiled.save(tmp_path / "out")
    proof = compiled.prove_written(tmp_path / "out")
    assert proof, str(proof)
    assert "last, smaller micro-batch" not in str(proof)


def written(programs: Programs, graph: Graph, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for rank in range(len(programs.ranks)):
        write_phases(folder, programs, emit_phases(programs, rank, graph, CPU), Origin())
    return folder


@pytest.mark.parametrize(
    ("devices", "options", "stride"),
    [
        (2, {"parallel": "tp"}, 18),
        pytest.param(2, {"parallel": "zero3"}, 9, marks=pytest.mark.slow),
        pytest.param(4, {"parallel": "dp+tp"}, 90, marks=pytest.mark.slow),
    ],
)
def test_mutations_of_files_are_refused(
    devices: int, options: dict[str, Any], stride: int, tmp_path: Path
) -> None:
    compiled = planned(block, devices, **options)
    graph, folder = compiled.graph, tmp_path / "out"
    assert prove(graph, read_programs(written(compiled.programs, graph, folder))).proven
    ends: Counter[str] = Counter()
    for mutant in itertools.islice(mutants(compiled.programs), 0, None, stride):
        try:
            proof = prove(graph, read_programs(written(mutant.programs, graph, folder)))
        except (BackendError, AssertionError, KeyError):  # it cannot be written
            ends["unwritten"] += 1
            continue
        ends[proof.verdict] += 1
        assert not proof.proven, f"{mutant.kind} {mutant.what}"
    assert ends["WRONG"]


@pytest.mark.slow
def test_memory_that_is_not_yet_or_no_longer_what_it_was_is_refused(tmp_path: Path) -> None:
    compiled = planned(block, 2, parallel="tp", training=False)
    compiled.save(tmp_path / "out")
    phases = [emit_phases(compiled.programs, rank, compiled.graph, CPU) for rank in range(2)]
    for kind, message in {
        "not waited for": "all_.* is read before it is whole",
        "overwritten": "copy_.* writes to what others may read",
    }.items():
        mutants = (one for one in graph_mutants(phases) if one.kind == kind)
        rank, made = next((one.rank, made) for one in mutants if (made := one.make()))
        write_phases(tmp_path / "out", compiled.programs, made[rank], Origin())
        with pytest.raises(BackendError, match=message):
            read_programs(tmp_path / "out")
        write_phases(tmp_path / "out", compiled.programs, phases[rank], Origin())


def spoil(path: Path, change: str) -> None:
    """Change the JSON files of an archive."""
    with zipfile.ZipFile(path) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    for name, data in contents.items():
        if name.endswith("extra/partitioner.json"):
            header = json.loads(data)
            if change == "header":
                del header["parts"]
            elif change == "part":
                name_of, (value, _) = next(iter(header["parts"].items()))
                header["parts"][name_of] = [value, None]
            contents[name] = json.dumps(header).encode()
            if change == "sender":
                contents[name] = re.sub(rb"(message of \d+ on) 0", rb"\1 7", contents[name])
        elif name.endswith("models/model.json") and change == "reduction":
            contents[name] = data.replace(b'"as_string": "sum"', b'"as_string": "max"')
        elif name.endswith("models/model.json") and change == "operator":
            contents[name] = data.replace(
                b"torch.ops.aten.relu.default", b"torch.ops.aten.neg.default"
            )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("part", 1, "WRONG: rank 0, input "),
        ("reduction", 1, "WRONG: rank 0, all_reduce "),
        ("operator", 4, "not proven: rank 0, node 'forward: "),
    ],
)
def test_a_spoilt_file_is_refused_with_the_first_wrong_step(
    change: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(block, 2, parallel="tp").save(tmp_path / "out")
    for path in (tmp_path / "out").glob("rank*.pt2"):
        spoil(path, change)
    assert main(["verify", str(tmp_path / "out"), "--symbolic"]) == code
    assert capsys.readouterr().out.startswith(message)


def test_a_message_in_the_name_of_another_rank_is_refused(tmp_path: Path) -> None:
    planned(layers, 2, parallel="pp", micro_batches=2, training=False).save(tmp_path / "out")
    for path in (tmp_path / "out").glob("rank0*.pt2"):
        spoil(path, "sender")
    with pytest.raises(BackendError, match=r"of \d on 7 for \d on 1' is met in phase \d on 0"):
        read_programs(tmp_path / "out")


def test_files_of_an_earlier_version_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(block, 2, parallel="tp", training=False).save(tmp_path / "out")
    spoil(tmp_path / "out/rank0.pt2", "header")
    assert main(["verify", str(tmp_path / "out"), "--symbolic"]) == 1
    assert "does not say what its values are: partition the module" in capsys.readouterr().err
