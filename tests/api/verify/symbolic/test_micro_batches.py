"""The sum over micro-batches is proven to be the batch's, and spoilt steps are refused."""

import json
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.plans.mutated_programs import mutants
from partitioner.api.verify.symbolic.ir_programs import programs_of
from partitioner.api.verify.symbolic.micro_batches import Rows, Runs, sum_of
from partitioner.api.verify.symbolic.program import Program
from partitioner.api.verify.symbolic.prove import prove
from partitioner.cli.main import main
from partitioner.ir.phases import Part


class Square(nn.Module):
    """The mean square of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


def planned(devices: int, batch: int = 8, **options: Any) -> Any:
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8), Square()]
    return partitioner.compile(
        nn.Sequential(*layers),
        (torch.randn(batch, 8),),
        devices=devices,
        training=True,
        cluster=f"{devices}xideal",
        time_limit_s=5,
        **options,
    )


@pytest.fixture(scope="module")
def staged() -> Any:
    return planned(2, parallel="pp", micro_batches=4, schedule="1f1b")


def in_rows(compiled: Any) -> list[Program]:
    micro = compiled.model.module.micro
    rows = Rows(micro.count, micro.rows, micro.shares)
    return [*programs_of(compiled.programs, compiled.graph, rows)]


def test_a_step_in_micro_batches_is_proven(staged: Any) -> None:
    assert prove(staged.graph, in_rows(staged)).proven
    said = str(staged.verify(symbolic=True))
    assert "4 micro-batches run once each and share the batch; gradients are their sum" in said


def test_a_smaller_last_micro_batch_has_its_share() -> None:
    compiled = planned(2, batch=8, parallel="pp", micro_batches=3, schedule="1f1b")
    assert compiled.model.module.micro.shares == (3 / 8, 3 / 8, 2 / 8)
    assert compiled.verify(symbolic=True)


def number(runs: Runs, part: Part) -> int:
    """The phase of a part that a rank of one stage runs."""
    return next(phase for phase in runs.reads if runs.phases.of(phase)[0] is part)


def without_a_backward_pass(runs: Runs) -> Runs:
    left_out = number(runs, Part.BACKWARD), 2
    return replace(runs, order=tuple(run for run in runs.order if run != left_out))


def with_a_backward_pass_twice(runs: Runs) -> Runs:
    again = number(runs, Part.BACKWARD), 2
    return replace(runs, order=(*runs.order[:-1], again, runs.order[-1]))


def with_backward_first(runs: Runs) -> Runs:
    order = list(runs.order)
    one, other = ((number(runs, part), 1) for part in (Part.FORWARD, Part.BACKWARD))
    one_at, other_at = order.index(one), order.index(other)
    order[one_at], order[other_at] = other, one
    return replace(runs, order=tuple(order))


def with_micro_batches_exchanged(runs: Runs) -> Runs:
    forward = number(runs, Part.FORWARD)
    named = {(forward, 0): (forward, 1), (forward, 1): (forward, 0)}
    return replace(runs, order=tuple(named.get(run, run) for run in runs.order))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_backward_pass, "it runs backward 0 of micro-batch 2 never"),
        (with_a_backward_pass_twice, "it runs backward 0 of micro-batch 2 2 times"),
        (with_backward_first, "of micro-batch 1 runs before"),
        (with_micro_batches_exchanged, "micro-batch 1 reads "),
    ],
)
def test_an_order_that_is_spoilt_on_a_rank_is_refused(
    staged: Any, change: Callable[[Runs], Runs], message: str
) -> None:
    first, *others = in_rows(staged)
    assert first.runs is not None
    proof = prove(staged.graph, [replace(first, runs=change(first.runs)), *others])
    assert proof.verdict == "WRONG", str(proof)
    assert message in str(proof)


def rows_of(change: Callable[[Rows], Rows], programs: list[Program]) -> list[Program]:
    return [
        replace(
            program, runs=program.runs and replace(program.runs, rows=change(program.runs.rows))
        )
        for program in programs
    ]


def of_fewer(rows: Rows) -> Rows:
    return replace(rows, count=3)


def of_none(rows: Rows) -> Rows:
    return replace(rows, count=0, rows={}, shares=())


def not_split(rows: Rows) -> Rows:
    return replace(rows, rows={}, shares=(1.0,) * 4)


def overlapping(rows: Rows) -> Rows:
    return replace(rows, rows={n: (of[0], of[0], *of[2:]) for n, of in rows.rows.items()})


def with_a_gap(rows: Rows) -> Rows:
    return replace(rows, rows={n: (*of[:-1], (7, 1)) for n, of in rows.rows.items()})


def of_other_sizes(rows: Rows) -> Rows:
    parts = ((0, 1), (1, 3), (4, 2), (6, 2))
    return replace(rows, rows=dict.fromkeys(rows.rows, parts), shares=(1 / 8, 3 / 8, 1 / 4, 1 / 4))


def not_scaled(rows: Rows) -> Rows:
    return replace(rows, shares=(1.0,) * 4)


def scaled_wrongly(rows: Rows) -> Rows:
    return replace(rows, shares=(0.25, 0.25, 0.5, 0.25))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_fewer, "it runs more than 3"),
        (of_none, "it runs more than 0"),
        (not_split, "the gradient of the loss is multiplied by 4 in all"),
        (overlapping, "two of them have row 0 of "),
        (with_a_gap, "none of them has row 6 of "),
        (of_other_sizes, "micro-batch 0 has 1 rows of "),
        (not_scaled, "the gradient of 2 of 8 rows of 'input' is multiplied by 1"),
        (scaled_wrongly, "the gradient of 2 of 8 rows of 'input' is multiplied by 0.5"),
    ],
)
def test_parts_that_are_not_the_batch_are_refused(
    staged: Any, change: Callable[[Rows], Rows], message: str
) -> None:
    proof = prove(staged.graph, rows_of(change, in_rows(staged)))
    assert proof.verdict == "WRONG"
    assert message in str(proof)


def test_ranks_with_other_rows_are_refused(staged: Any) -> None:
    first, *others = in_rows(staged)
    proof = prove(staged.graph, [first, *rows_of(overlapping, others)])
    assert str(proof) == "WRONG: rank 1: other ranks have other micro-batches"


def test_a_gradient_that_is_not_added_up_is_refused() -> None:
    compiled = planned(2, parallel="zero3", micro_batches=2)
    first, *others = in_rows(compiled)
    assert first.runs is not None
    assert prove(compiled.graph, [first, *others]).proven
    sums = {sum_of(name): name for name in first.runs.summed}
    total = next(out for out in first.outputs if out.value in sums)
    one = replace(total, value=sums[total.value])
    outputs = tuple(one if out == total else out for out in first.outputs)
    proof = prove(compiled.graph, [replace(first, outputs=outputs), *others])
    assert proof.verdict == "WRONG"
    assert f"output {total.whole!r}: it delivers " in str(proof)


def test_a_result_of_one_micro_batch_is_no_gradient_of_all() -> None:
    """A phase behind all micro-batches reads sums alone."""
    compiled = planned(2, parallel="dp", micro_batches=2)
    programs = in_rows(compiled)
    assert prove(compiled.graph, programs).proven
    spoilt = [replace(p, runs=p.runs and replace(p.runs, summed=frozenset())) for p in programs]
    proof = prove(compiled.graph, spoilt)
    assert proof.verdict == "WRONG"
    assert "which each micro-batch has of its own" in str(proof)


@pytest.mark.parametrize("parallel", ["dp", "tp"])
def test_mutations_of_a_step_in_micro_batches_are_refused(parallel: str) -> None:
    compiled = planned(2, parallel=parallel, micro_batches=2)
    ends: Counter[str] = Counter()
    for mutant in mutants(compiled.programs):
        proof = prove(compiled.graph, programs_of(mutant.programs, compiled.graph))
        ends[proof.verdict] += 1
        assert not proof.proven, f"{mutant.kind} {mutant.what}"
    assert ends["WRONG"]


def test_ranks_that_wait_for_each_other_are_refused(staged: Any) -> None:
    """Rank 1 takes the last micro-batch first, for which rank 0 waits with its second backward."""
    first, second = in_rows(staged)
    assert second.runs is not None
    phases = second.runs.phases
    named = {0: 3, 3: 0}
    order = tuple(
        (phase, index if phases.is_once(phase) else named.get(index, index))
        for phase, index in second.runs.order
    )
    proof = prove(staged.graph, [first, replace(second, runs=replace(second.runs, order=order))])
    assert proof.verdict == "WRONG"
    assert "waits for itself in " in str(proof)


def spoil(path: Path, change: str) -> None:
    """Change the description in an archive."""
    with zipfile.ZipFile(path) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    for name, data in contents.items():
        if name.endswith("extra/partitioner.json"):
            header = json.loads(data)
            runs = header["runs"]
            if change == "summed":
                header["summed"] = header["summed"][1:]
            elif change == "shares":
                runs["shares"][1] *= 2
            elif change == "order":
                runs["order"] = [one for one in runs["order"] if one != ["backward 0", 1]]
            elif change == "rows":
                runs["rows"] = {n: [of[0], *of[:-1]] for n, of in runs["rows"].items()}
            else:
                del header["runs"]
            contents[name] = json.dumps(header).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def test_a_spoilt_step_in_files_is_refused(
    staged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for change, code, message in (
        ("summed", 1, "WRONG: rank 0, "),
        ("shares", 1, "WRONG: rank 0, the micro-batches: the gradient of 2 of 8 rows"),
        ("order", 1, "WRONG: rank 0, the micro-batches: it runs backward 0 of micro-batch 1 never"),
        ("rows", 1, "WRONG: rank 0, the micro-batches: two of them have row 0"),
        ("runs", 1, "partition the module again"),
    ):
        folder = tmp_path / change
        staged.save(folder)
        for path in folder.glob("rank*.pt2"):
            spoil(path, change)
        assert main(["verify", str(folder), "--symbolic"]) == code
        shown = capsys.readouterr()
        assert message in shown.out + shown.err
