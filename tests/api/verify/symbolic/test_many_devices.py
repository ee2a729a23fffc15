"""Plans for more devices than rank files are written for are proven from their programs."""

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import examples
from partitioner.api.lowering import lower
from partitioner.api.verify.symbolic.ir_programs import prove_programs
from partitioner.cli.main import main
from partitioner.ir.program import Comm, Compute

DEVICES = 72


def test_a_plan_for_many_devices_is_proven_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "mlp.onnx", tmp_path / "out"
    onnx.save(examples.build("mlp", layers=2, hidden=144, batch=4), model)
    options = ["--devices", str(DEVICES), "--cluster", f"{DEVICES}xideal", "--parallel", "tp"]
    assert main([str(model), *options, "-o", str(out), "-q"]) == 0
    assert not [*out.glob("rank*")]
    capsys.readouterr()
    assert main(["verify", str(out), "--symbolic"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"proven: {DEVICES} ranks compute the whole model\n")
    assert "there are none" in shown


class Square(nn.Module):
    """The mean square of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


def test_collectives_of_many_ranks_are_followed_part_by_part() -> None:
    """Each rank has a part of every parameter, and gets the gradient of that part."""
    compiled = partitioner.compile(
        nn.Sequential(nn.Linear(DEVICES, DEVICES), Square()),
        (torch.zeros(8 * DEVICES, DEVICES),),
        devices=DEVICES,
        cluster="9x8xh100",
        training=True,
        parallel="zero3",
        time_limit_s=5,
    )
    assert compiled.verify(symbolic=True)
    programs = lower(compiled.graph, compiled.run_schedule, DEVICES, deliver_all=True)
    comms = [comm for comm in programs.ranks[0].comms if len(comm.transfers) == DEVICES**2]
    assert comms
    assert not any(comm.part for program in programs.ranks for comm in program.comms)

    def without_a_part(step: Compute | Comm) -> Compute | Comm:
        is_it = isinstance(step, Comm) and step.seq == comms[0].seq
        return replace(step, transfers=step.transfers[:-1]) if is_it else step

    ranks = tuple(replace(r, steps=tuple(map(without_a_part, r.steps))) for r in programs.ranks)
    proof = prove_programs(compiled.graph, replace(programs, ranks=ranks))
    assert proof.verdict == "WRONG"
    assert "what arrives does not fill it exactly" in str(proof)
