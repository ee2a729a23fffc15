"""Values of a rank between its phases: moved, added up, dropped and written, without any pass."""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from partitioner.backends.torch.graphs.emit import PassGraph
from partitioner.backends.torch.graphs.phases import RankPhases
from partitioner.backends.torch.running.step_values import StepPlan, StepValues
from partitioner.ir.phases import Part, RunOrder, whole_batch_order
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.program import Output
from partitioner.ir.types import TensorType

WHOLE = whole_batch_order(1, trains=True)
FORWARD, BACKWARD = 1, 2
#: Arguments and results of a phase.
Names = tuple[Sequence[str], Sequence[str]]


def phases_of(
    order: RunOrder,
    names: Mapping[int, Names],
    outputs: Sequence[str],
    summed: Sequence[str] = (),
    shape: tuple[int, ...] = (),
) -> RankPhases:
    """Phases with these names, outputs of one shape, and graphs that nothing runs."""
    empty = fx.Graph()
    empty.output(())
    module = fx.GraphModule(nn.Module(), empty)
    graphs = {
        phase: PassGraph(module, tuple(arguments), tuple(results))
        for phase, (arguments, results) in names.items()
    }
    delivered = tuple(Output(name, name, None) for name in outputs)
    types = {name: TensorType.of("float32", shape) for name in outputs}
    return RankPhases(0, graphs, (), {}, delivered, types, frozenset(summed), order)


def test_a_whole_batch_turns_before_its_backward_pass() -> None:
    assert [run for run in WHOLE.runs(0) if run[0] in (FORWARD, BACKWARD)] == [(1, 0), (2, 0)]
    assert [phase for phase, _ in WHOLE.runs(0) if WHOLE.is_late(phase)] == [BACKWARD]
    assert not any(whole_batch_order(1).is_late(phase) for phase in range(5))


def test_a_value_lives_up_to_its_last_reader() -> None:
    phases = phases_of(
        WHOLE,
        {FORWARD: (["w", "x"], ["loss", "h", "unread"]), BACKWARD: (["h", "loss", "w"], ["g"])},
        ["loss", "g"],
    )
    plan = StepPlan([phases], WHOLE.runs(0), {}, ["g"])
    assert [run.phase for run in plan.runs] == [FORWARD, BACKWARD]
    own = {"w": torch.ones(1), "x": torch.ones(1)}
    values, x = StepValues(plan, [own]), weakref.ref(own["x"])
    arguments = values.arguments(plan.runs[0])
    assert x() is not None
    arguments.clear()
    assert x() is None
    assert values.finish(plan.runs[0], [torch.zeros(1), torch.ones(1), torch.ones(1)]) == []
    assert own.keys() == {"w", "loss", "h"}
    values.arguments(plan.runs[1])
    assert not own
    values.finish(plan.runs[1], [torch.full((1,), 3.0)])
    assert values.total("g") == 3
    assert own.keys() == {"g"}


def test_micro_batches_add_gradients_and_read_what_the_one_before_wrote() -> None:
    order = RunOrder(pipeline_schedule("gpipe", (0,), 2), ((0,),))
    names: Mapping[int, Names] = {
        FORWARD: (["b", "x"], ["next", "loss"]),
        BACKWARD: (["b"], ["g"]),
    }
    phases = phases_of(order, names, ["next", "loss", "g"], summed=["g"])
    plan = StepPlan([phases] * 2, order.runs(0), {"next": "b"}, ["next", "loss", "g"])
    stored = {"b": torch.zeros(1)}
    values = StepValues(plan, [{**stored, "x": torch.tensor([x])} for x in (1.0, 10.0)])
    for run in plan.runs:
        read = [x for x in values.arguments(run) if x is not None]
        results = [read[0] + read[-1], read[0].view(1)] if run.phase == FORWARD else [read[0] + 1]
        values.finish(run, results)
    assert [values.result("next", m).item() for m in range(2)] == [1, 11]
    assert [values.result("loss", m).item() for m in range(2)] == [0, 1]
    assert values.total("g") == (0 + 1) + (1 + 1)
    first = values.result("loss", 0)
    assert first.data_ptr() == stored["b"].data_ptr()
    shown: dict[str, Tensor] = {"loss": first}
    values.store(stored, shown)
    assert stored["b"] == 11
    assert shown["loss"] == 0, "a view of a buffer is copied before the buffer is written over"


def test_results_of_micro_batches_are_put_together_as_they_are_made() -> None:
    order = RunOrder(pipeline_schedule("gpipe", (0,), 2), ((0,),))
    phases = phases_of(order, {FORWARD: (["x"], ["y"])}, ["y"], shape=(3, 2))
    plan = StepPlan([phases] * 2, [(FORWARD, 0), (FORWARD, 1)], {}, ["y"])
    assert plan.joined == {"y": (slice(0, 3), slice(3, 6))}
    values = StepValues(plan, [{"x": torch.zeros(1)} for _ in range(2)])
    parts = [torch.full((2, 3), float(m + 1)).t() for m in range(2)]
    for run, part in zip(plan.runs, parts, strict=True):
        assert values.whole("y") is None
        values.arguments(run)
        values.finish(run, [part])
    whole = values.whole("y")
    assert whole is not None
    assert torch.equal(whole, torch.cat(parts))
    assert values.result("y", 1).data_ptr() == whole[3:].data_ptr()
    assert values.result("y", 0).stride() == whole.stride()


def test_a_sum_that_a_later_phase_reads_is_held_once() -> None:
    order = RunOrder(pipeline_schedule("gpipe", (0,), 2), ((0,),))
    reduce = order.phases.number(Part.REDUCE)
    names: Mapping[int, Names] = {BACKWARD: (["w"], ["g"]), reduce: (["g"], ["reduced"])}
    phases = phases_of(order, names, ["reduced"], summed=["g"])
    plan = StepPlan([phases] * 2, order.runs(0), {}, ["reduced"], adds=True)
    values = StepValues(plan, [{"w": torch.zeros(1)} for _ in range(2)])
    gradient = torch.ones(1)
    for run in plan.runs:
        if run.phase == reduce:
            (total,) = values.arguments(run)
            assert total is gradient
            assert total == 2
            values.finish(run, [total])
        else:
            _, total = values.arguments(run)
            values.finish(run, [gradient if total is None else total.add_(1)])
    assert values.total("reduced") == 2
