"""Rows of ranks hold numbers, and behind them parts of a sum."""

import pytest
import torch

from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.agreeing.rows import Rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_meet_give_their_numbers_and_the_sum_of_their_parts(dtype: torch.dtype) -> None:
    numbers = {0: [1, -1, 2**56 - 1], 1: [4, 5, 6]}
    parts = {
        0: torch.tensor([[0.5, 2.0]], dtype=dtype),
        1: torch.tensor([[3.0, -1.0]], dtype=dtype),
    }
    met = Rows(2, 3)
    with torch.inference_mode():
        ranks = [Rows(2, 3), Rows(2, 3)]
    for rank, rows in enumerate(ranks):
        rows.write(numbers[rank], parts[rank])
        assert torch.equal(rows.sent[0], rows.sent[1])
        met.brought[rank] = rows.sent[0]
    assert met.table == [numbers[0], numbers[1]]
    total = met.total(parts[0])
    assert torch.equal(total, parts[0] + parts[1])
    met.brought.zero_()
    assert torch.equal(total, parts[0] + parts[1])  # it is no part of the rows' memory


def test_rows_on_their_way_are_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is interrupted as it sends its row leaves that to the message."""
    agreement, sent = Agreement(1), list[torch.Tensor]()
    agreement.ranks = 2

    def exchange(copies: torch.Tensor, _: str, whole: torch.Tensor) -> object:
        sent.append(copies)
        if len(sent) == 1:
            raise KeyboardInterrupt
        return lambda: whole

    monkeypatch.setattr(agreement, "_exchange", exchange)
    with pytest.raises(KeyboardInterrupt):
        agreement.gather([1, 2], None, "a step", lambda rows: rows)
    for number in (3, 4):
        agreement.gather([number, 5], None, "a step", lambda rows: rows)()
    assert sent[0][0, :2].tolist() == [1, 2]
    assert sent[1] is sent[2], "rows that have met are used again"
