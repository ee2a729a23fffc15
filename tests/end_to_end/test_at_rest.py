"""What the kinds of ZeRO hold between steps: as the papers say, as predicted, as measured."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.modules.at_rest_jobs import JOBS, expected_bytes, program


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_predicted_bytes_are_those_of_the_papers(kind: str, ranks: int) -> None:
    compiled = program(kind, ranks)
    expected = expected_bytes(kind, ranks)
    residents = compiled.schedule.residents
    gradients = set(compiled.traced.gradients.values())
    for rank in range(ranks):
        held = sum(nbytes for (device, _), nbytes in residents.items() if device == rank)
        assert held == expected["parameters"] + expected["state"]
        made = {
            key: nbytes
            for task in compiled.schedule.tasks
            for device, key, nbytes in task.writes
            if device == rank and key[0] in gradients and task.comm is None
        }
        assert sum(made.values()) == expected["gradients"]


def test_less_is_held_from_one_kind_to_the_next() -> None:
    peaks = [max(program(kind, 2).summary["peak_bytes"]) for kind in ("zero1", "zero2", "zero3")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_ranks_of_one_process_give_the_gradients(kind: str) -> None:
    compiled = program(kind, 3)
    assert compiled.verify()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_hold_as_much_and_train_to_the_same_weights(run_job: RunJob, job: str) -> None:
    run_job("modules/at_rest_jobs.py", job)
