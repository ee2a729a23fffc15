"""Marks between the tasks of a pass: by the processor's clock, and by events against a fake one."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import fx

from partitioner.backends.observed import Role
from partitioner.backends.torch.graphs.notes import note_tasks
from partitioner.backends.torch.measuring import recording
from partitioner.backends.torch.measuring.clocks import Clock, StreamClock
from partitioner.backends.torch.measuring.recording import COUNTS, Training, Update, marked

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass
class Stream:
    """A GPU that runs behind the processor: each event is reached at the next of some times.

    Attributes:
        reached_ms: Milliseconds at which the events are reached, in the order of recording.
        calls: What was asked of it.
    """

    reached_ms: list[float]
    calls: list[str] = field(default_factory=list)

    def event(self) -> "StreamEvent":
        return StreamEvent(self)

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@dataclass
class StreamEvent:
    stream: Stream
    at_ms: float = -1.0

    def record(self) -> None:
        self.at_ms = self.stream.reached_ms.pop(0)
        self.stream.calls.append("record")

    def elapsed_time(self, later: "StreamEvent") -> float:
        assert self.stream.calls[-1] == "synchronize", "an event is read before it was reached"
        return later.at_ms - self.at_ms


def module() -> fx.GraphModule:
    """y = relu(relu(x)) as two tasks, between a constant and a communication's two ends."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.relu.default, (x,))
    second = graph.call_method("contiguous", (first,))
    third = graph.call_function(aten.relu.default, (second,))
    fourth = graph.call_method("contiguous", (third,))
    waited = graph.call_function(c10d.wait_tensor.default, (fourth,))
    fifth = graph.call_function(aten.neg.default, (waited,))
    for nodes, task in (([first, second], "a"), ([third], "b"), ([fourth, waited, fifth], 4)):
        note_tasks(nodes, [task])
    graph.output((fifth,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_marks_stand_between_tasks_and_results_are_the_same() -> None:
    ticks = iter(range(100))
    clock = Clock(now=lambda: float(next(ticks)))
    timed, spans = marked(module(), clock)
    assert [(span.nodes, span.comms, span.role) for span in spans] == [
        (("a",), (), Role.COMPUTE),
        (("b",), (), Role.COMPUTE),
        ((), (4,), Role.SEND),
        ((), (4,), Role.RECEIVE),
    ]
    assert {span.label for span in spans} == {"aten.relu", "contiguous"}
    assert clock.begin() == 0.0
    (result,) = timed(torch.tensor([-1.0, 2.0]))
    assert result.tolist() == [0.0, -2.0]
    assert clock.marks() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_events_of_a_stream_are_read_once_all_are_reached() -> None:
    stream = Stream([5.0, 7.0, 8.0, 12.0, 12.5, 13.0])
    clock = StreamClock(event=stream.event, synchronize=stream.synchronize, now=lambda: 100.0)
    timed, spans = marked(module(), clock)
    assert clock.begin() == 100.0
    timed(torch.tensor([1.0]))
    seconds = clock.marks()
    assert [round(at - 100.0, 6) for at in seconds] == [0.002, 0.003, 0.007, 0.0075, 0.008]
    assert len(seconds) == len(spans) + 1
    assert stream.calls == ["synchronize", *["record"] * 6, "synchronize"]


def test_a_recorded_step_of_an_optimizer_writes_to_the_values_that_it_was_given() -> None:
    """Of plain parameters, and of a part of a gradient that has more."""
    values = {"w": torch.ones(4), "b": torch.zeros(2)}
    updates = [
        Update("w step", "w", "dw", cut=False),
        Update("b step", "b", "db", False, (((1, 2),),)),
    ]
    training = Training("sgd", updates, values)
    (optimizer,) = training.optimizers
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # for measurements it is 0
    assert (training.span.nodes, training.span.label) == (("w step", "b step"), "optimizer")
    gradients = {"dw": torch.full((4,), 10.0), "db": torch.tensor([5.0, 20.0, 30.0, 5.0])}
    training.step(gradients)
    taken = {name: tensor.tolist() for name, tensor in training.values().items()}
    assert taken == {name: tensor.tolist() for name, tensor in values.items()}
    assert taken == {"w": [-4.0] * 4, "b": [-10.0, -15.0]}
    assert [tensor.numel() for tensor in training.tensors] == [4, 2]
    assert all(parameter.grad is None for parameter in training.parameters)


def test_a_plan_without_parameters_has_no_step() -> None:
    training = Training("adamw", (), {})
    training.step({})
    assert training.values() == {}
    assert not list(training.tensors)


@pytest.mark.parametrize(
    ("counts", "most", "passes"),
    [
        ([(0, 50), (0, 40)], 50, 1),
        ([(8, 58), (4, 54), (0, 50)], 50, 3),
        ([(8, 58), (4, 54), *[(8, 58)] * COUNTS], 54, COUNTS),
    ],
)
def test_a_pass_is_counted_again_until_all_that_is_freed_is_seen(
    counts: list[tuple[int, int]], most: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are not seen to go count too much; at last the pass with the fewest of them is."""
    left = iter(counts)
    agreed: list[int] = []
    monkeypatch.setattr(recording, "count_bytes", lambda _: next(left))
    monkeypatch.setattr(dist, "all_reduce", lambda unseen, *_, **__: agreed.append(unseen.item()))
    nbytes = recording._most_bytes(lambda: None, 1000, torch.device("cpu"))
    assert (nbytes, len(agreed)) == (1000 + most, passes)


def test_muon_steps_over_matrices_and_adamw_over_the_rest() -> None:
    values = {"w": torch.ones(4, 2), "b": torch.zeros(2)}
    updates = [Update(f"{name} step", name, f"d{name}", cut=False) for name in values]
    training = Training("muon", updates, values)
    assert [type(one) for one in training.optimizers] == [torch.optim.Muon, torch.optim.AdamW]
    training.step({"dw": torch.ones(4, 2), "db": torch.ones(2)})
    assert len(list(training.tensors)) == 2 + 1 + 3  # momentum; two moments and a count
