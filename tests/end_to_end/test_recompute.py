"""Values of the forward pass that are computed again: the choice, its cost, and its execution."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partitioner
from helpers.modules.small_gpt import small_gpt
from partitioner.api.compiled.module import ModuleProgram, variant
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate, one_device
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.report.text.diff import diff
from partitioner.report.text.show import show
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.request import Request
from partitioner.search.spaces.explicit import first_problem
from partitioner.solver.outcome import Infeasible
from partitioner.solver.referee import evaluate_choices


class Chain(nn.Module):
    """Linear layers between consecutive widths."""

    def __init__(self, *widths: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(nn.functional.gelu(layer(x)))
        return x.square().mean()


def compiled(module: nn.Module, example: Any, **options: Any) -> ModuleProgram:
    program = partitioner.compile(module, example, training=True, optimizer="sgd", **options)
    assert isinstance(program, ModuleProgram)
    return program


def tiny(dropout: float = 0.0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Chain(4, 32, 16, 48, 4, dropout=dropout), (torch.randn(256, 4),)


@pytest.fixture(scope="module")
def kept() -> ModuleProgram:
    return compiled(*tiny(), recompute=False)


@pytest.fixture(scope="module")
def offered(kept: ModuleProgram) -> Graph:
    return kept.traced.offered


def peak(program: ModuleProgram) -> int:
    return max(program.summary["peak_bytes"])


def clones(graph: Graph, offered: Graph) -> list[str]:
    """Names of the operators that are computed again."""
    nodes = (node for node in graph.nodes if node.name in offered.optional)
    return [node.name for node in nodes if (row := row_of(node)) is None or not row.view]


def every_choice(offered: Graph) -> list[tuple[Graph, Evaluation]]:
    """Each graph that the offers allow, evaluated on one device."""
    cluster = resolve_cluster(None, 1)
    names = clones(offered, offered)
    rest = offered.optional - set(names)
    graphs = {}
    for count in range(len(names) + 1):
        for present in itertools.combinations(names, count):
            graph = chosen(offered, rest | set(present))
            graphs[graph.digest] = graph
    return [(graph, one_device(graph, cluster)) for graph in graphs.values()]


@pytest.mark.slow
def test_the_choice_is_the_best_of_all(offered: Graph) -> None:
    """Of launches that the tests' own prices have."""
    kept = compiled(*tiny(), recompute=False, launches="native")
    evaluations = [evaluation for _, evaluation in every_choice(offered)]
    least = min(evaluation.peak[0].bytes for evaluation in evaluations)
    assert least < 0.9 * peak(kept)
    costs = set()
    for limit in (peak(kept), (peak(kept) + least) // 2, least):
        program = compiled(*tiny(), recompute=True, memory=limit, gap=0.0, launches="native")
        best = min(e.step_s for e in evaluations if e.peak[0].bytes <= limit)
        assert program.cost == pytest.approx(best)
        assert program.cost == program.plan.certificate.cost
        assert program.plan.certificate.status == "optimal"
        assert peak(program) <= limit
        costs.add(round(program.cost / kept.cost, 9))
    assert len(costs) > 2
    assert min(costs) == 1.0


def test_the_problem_has_the_memory_that_the_referee_counts(offered: Graph) -> None:
    cluster = resolve_cluster(None, 1)
    _, built = first_problem(offered, cluster, Request())
    for graph, evaluation in every_choice(offered):
        picks = [_pick(graph, name, built.candidates[name]) for name in built.candidates]
        outcome = evaluate_choices(built.problem, picks)
        assert outcome.load_s[0] == pytest.approx(evaluation.step_s)
        assert outcome.peak_bytes[0] == evaluation.peak[0].bytes
        exact = evaluation.exact_peak[0].bytes
        assert exact <= evaluation.peak[0].bytes


def _pick(graph: Graph, name: str, options: tuple[PlacedNode, ...]) -> int:
    node = graph.by_name.get(name)
    if node is None:
        return next(i for i, option in enumerate(options) if option.absent)
    return next(i for i, option in enumerate(options) if option.node.reads == node.reads)


def test_a_node_that_is_left_out_is_read_by_none(offered: Graph) -> None:
    none = chosen(offered, ())
    assert not none.optional
    assert not clones(none, offered)
    assert all(len(n.inputs) == 1 for n in none.nodes if n.op == "partitioner::either")
    everything = chosen(offered, offered.optional)
    assert clones(everything, offered) == clones(offered, offered)
    orphan = clones(offered, offered)[0]
    assert chosen(offered, {orphan}).by_name.keys() <= everything.by_name.keys()


@pytest.fixture(scope="module")
def tight() -> ModuleProgram:
    """A model with dropout that fits only if values are computed again."""
    kept = compiled(*tiny(dropout=0.1), recompute=False)
    limit = int(0.9 * peak(kept))
    program = compiled(*tiny(dropout=0.1), memory=limit)
    assert peak(program) <= limit < peak(kept)
    assert program.cost > kept.cost
    return program


def test_auto_computes_again_what_does_not_fit(tight: ModuleProgram) -> None:
    names = clones(tight.graph, tight.traced.offered)
    assert names
    assert all(name in tight.plan.nodes and name.endswith("/again") for name in names)
    assert tight.summary["notes"] == [
        "no plan that keeps all values for the backward pass was found to fit",
        f"{len(names)} operators of the forward pass are computed again in the backward pass",
    ]
    assert "/again" in show(tight, everything=True)


def test_one_rank_computes_what_the_module_does(tight: ModuleProgram) -> None:
    assert tight.verify()
    plain, batch = tiny(dropout=0.1)
    other = compiled(plain, batch, recompute=False)
    loss, gradients = tight.gradients(*batch, seed=5)
    expected_loss, expected = other.gradients(*batch, seed=5)
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    difference = diff(other, tight, ("kept", "tight"))
    assert set(clones(tight.graph, tight.traced.offered)) <= set(difference["only_after"])


def test_a_saved_plan_is_loaded_with_its_recomputed_nodes(
    tight: ModuleProgram, tmp_path: Path
) -> None:
    folder = tight.save(tmp_path / "chain.partition")
    model, batch = tiny(dropout=0.1)
    loaded = partitioner.load(folder, module=model, example_inputs=batch)
    assert isinstance(loaded, ModuleProgram)
    assert not loaded.warnings
    assert loaded.graph.digest == tight.graph.digest
    assert loaded.plan == tight.plan
    assert loaded.evaluation == tight.evaluation
    assert loaded.verify_written(folder)


def test_a_plan_in_constraints_decides_what_is_computed_again(tight: ModuleProgram) -> None:
    again = compiled(*tiny(dropout=0.1), constraints=tight.plan)
    assert again.plan.nodes == tight.plan.nodes
    with pytest.raises(OptionError, match="the plan in constraints says what is recomputed"):
        compiled(*tiny(dropout=0.1), constraints=tight.plan, recompute=True)


def test_other_batches_compute_the_same_again(tight: ModuleProgram) -> None:
    x = tiny()[1][0][:64]
    smaller = variant(tight, (x,), {}, training=True, share=lambda search: search())
    assert list(smaller.plan.nodes) == list(tight.plan.nodes)
    evaluating = variant(tight, (x,), {}, training=False, share=lambda search: search())
    assert not evaluating.graph.backward


def test_no_plan_fits_without_recomputation(tight: ModuleProgram) -> None:
    limit = tight.cluster.devices[0].memory_bytes
    with pytest.raises(Infeasible):
        compiled(*tiny(dropout=0.1), recompute=False, memory=limit)


@pytest.mark.slow
def test_a_limit_below_the_weights_is_explained_with_recomputation_allowed() -> None:
    module, example = tiny()
    fits = r"parameters.*it fits in blocks with --memory \d+"
    with pytest.raises(Infeasible, match=fits) as refusal:
        compiled(module, example, devices=2, memory="1KB")
    assert refusal.value.relaxations


def test_parts_of_a_chain_are_computed_again() -> None:
    check_recomputed(*tiny(), "dp")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp", "zero3", "tp"])
def test_parts_are_computed_again(parallel: str) -> None:
    check_recomputed(*small_gpt(dropout=0.1), parallel)


def check_recomputed(model: nn.Module, batch: Any, parallel: str) -> None:
    options: dict[str, Any] = {"devices": 2, "parallel": parallel}
    kept = compiled(model, batch, recompute=False, **options)
    limit = int(0.9 * peak(kept))
    program = compiled(model, batch, recompute=True, memory=limit, **options)
    assert peak(program) <= limit
    assert clones(program.graph, program.traced.offered)
    assert program.verify()
    assert evaluate(program.graph, program.plan, program.cluster) == program.evaluation


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing_in_the_module_is_inlined(recompute: bool) -> None:
    torch.manual_seed(0)
    assert compiled(Checkpointed(), torch.randn(4, 8), recompute=recompute).verify()


def test_recompute_is_checked() -> None:
    module, batch = tiny()
    with pytest.raises(OptionError, match="recompute 'yes' is not one of 'auto', True, False"):
        compiled(module, batch, recompute="yes")
    with pytest.raises(OptionError, match="recompute is for training"):
        partitioner.compile(module, batch, recompute=True)
    with pytest.raises(OptionError, match="recompute is for PyTorch modules"):
        partitioner.compile("model.onnx", recompute=True)
