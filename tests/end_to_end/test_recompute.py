"""Values of the forward pass that are computed again: the choice, its price, and what runs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import small_gpt
from torch import nn
from torch.utils.checkpoint import checkpoint

import partitioner
from partitioner.compiled.module import ModuleProgram
from partitioner.compiled.variants import variant
from partitioner.cost_model.cluster import resolve_cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate, one_device
from partitioner.frontends.torch.regions import Life, regions
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.offers import chosen
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.repeats import Stretch
from partitioner.report.text.diff import diff
from partitioner.report.text.show import show
from partitioner.search.explicit import first_problem
from partitioner.search.request import Request
from partitioner.solver import Infeasible, evaluate_choices


class Chain(nn.Module):
    """Layers of unlike widths; as many as the widths less one."""

    def __init__(self, *widths: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(nn.functional.gelu(layer(x)))
        return x.square().mean()


def compiled(module: nn.Module, example: Any, **options: Any) -> ModuleProgram:
    found = partitioner.compile(module, example, training=True, optimizer="sgd", **options)
    assert isinstance(found, ModuleProgram)
    return found


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
    """Operators that are computed again."""
    nodes = (node for node in graph.nodes if node.name in offered.optional)
    return [node.name for node in nodes if (row := row_of(node)) is None or not row.view]


def every_choice(offered: Graph) -> list[tuple[Graph, Evaluation]]:
    """Each graph that the offers allow, on one device."""
    cluster = resolve_cluster(None, 1)
    names = clones(offered, offered)
    rest = offered.optional - set(names)
    found = {}
    for count in range(len(names) + 1):
        for some in itertools.combinations(names, count):
            graph = chosen(offered, rest | set(some))
            found[graph.digest] = graph
    return [(graph, one_device(graph, cluster)) for graph in found.values()]


def test_the_choice_is_the_best_of_all(kept: ModuleProgram, offered: Graph) -> None:
    every = [evaluation for _, evaluation in every_choice(offered)]
    least = min(evaluation.peak[0].bytes for evaluation in every)
    assert least < 0.9 * peak(kept)
    costs = set()
    for limit in (peak(kept), (peak(kept) + least) // 2, least):
        found = compiled(*tiny(), recompute=True, memory=limit, gap=0.0)
        best = min(e.step_s for e in every if e.peak[0].bytes <= limit)
        assert found.cost == pytest.approx(best)
        assert found.cost == found.plan.certificate.cost
        assert found.plan.certificate.status == "optimal"
        assert peak(found) <= limit
        costs.add(round(found.cost / kept.cost, 9))
    assert len(costs) > 2
    assert min(costs) == 1.0


def test_the_problem_holds_what_the_referee_counts(offered: Graph) -> None:
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


def test_regions_are_cut_where_little_crosses() -> None:
    lives = [Life(at, at + 1, 1 if at % 3 == 2 else 9, saved=True) for at in range(11)]
    found = regions(lives, 12)
    starts = [at for at in range(1, 12) if found[at] != found[at - 1]]
    assert starts
    assert all(at % 3 == 0 for at in starts)
    assert regions([], 3) == (0, 0, 0)


def test_regions_of_repeated_blocks_are_alike() -> None:
    lives = [Life(at, at + 1, 1 if at % 3 == 2 else 9, saved=True) for at in range(28)]
    lives.append(Life(28, 29, 60, saved=True))  # a large one, beside which blocks are small
    blocks = (Stretch(3, 27, 3),)
    assert len(set(regions(lives, 30))) < 9
    found = regions(lives, 30, blocks)
    starts = [at for at in range(1, 30) if found[at] != found[at - 1]]
    assert [at for at in starts if 3 <= at < 27] == list(range(3, 27, 3))
    chain = [Life(at, at + 1, 1, saved=True) for at in range(29)]
    assert regions(chain, 30, (Stretch(0, 30, 1),)) == regions(chain, 30)


def test_what_is_left_out_is_read_by_nobody(offered: Graph) -> None:
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
    found = compiled(*tiny(dropout=0.1), memory=limit)
    assert peak(found) <= limit < peak(kept)
    assert found.cost > kept.cost
    return found


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
    same, wanted = other.gradients(*batch, seed=5)
    assert torch.equal(loss, same)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)
    moved = diff(other, tight, ("kept", "tight"))
    assert set(clones(tight.graph, tight.traced.offered)) <= set(moved["only_after"])


def test_a_saved_plan_is_loaded_with_what_it_computes_again(
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


def test_a_plan_that_is_kept_says_what_is_computed_again(tight: ModuleProgram) -> None:
    again = compiled(*tiny(dropout=0.1), constraints=tight.plan)
    assert again.plan.nodes == tight.plan.nodes
    with pytest.raises(OptionError, match="the plan in constraints says what is recomputed"):
        compiled(*tiny(dropout=0.1), constraints=tight.plan, recompute=True)


def test_other_batches_compute_the_same_again(tight: ModuleProgram) -> None:
    x = tiny()[1][0][:64]
    part = variant(tight, (x,), {}, training=True, share=lambda make: make())
    assert list(part.plan.nodes) == list(tight.plan.nodes)
    asked = variant(tight, (x,), {}, training=False, share=lambda make: make())
    assert not asked.graph.backward


def test_nothing_fits_without(tight: ModuleProgram) -> None:
    limit = tight.cluster.devices[0].memory_bytes
    with pytest.raises(Infeasible):
        compiled(*tiny(dropout=0.1), recompute=False, memory=limit)


def test_parts_of_a_chain_are_computed_again() -> None:
    _computed_again(*tiny(), "dp")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp", "zero3", "tp"])
def test_parts_are_computed_again(parallel: str) -> None:
    _computed_again(*small_gpt(dropout=0.1), parallel)


def _computed_again(model: nn.Module, batch: Any, parallel: str) -> None:
    options: dict[str, Any] = {"devices": 2, "parallel": parallel}
    kept = compiled(model, batch, recompute=False, **options)
    limit = int(0.9 * peak(kept))
    found = compiled(model, batch, recompute=True, memory=limit, **options)
    assert peak(found) <= limit
    assert clones(found.graph, found.traced.offered)
    assert found.verify()
    again = evaluate(found.graph, found.plan, found.cluster)
    assert again == found.evaluation


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


def test_what_is_asked_for_is_checked() -> None:
    module, batch = tiny()
    with pytest.raises(OptionError, match="recompute 'yes' is not one of 'auto', True, False"):
        compiled(module, batch, recompute="yes")
    with pytest.raises(OptionError, match="recompute is for training"):
        partitioner.compile(module, batch, recompute=True)
    with pytest.raises(OptionError, match="recompute is for PyTorch modules"):
        partitioner.compile("model.onnx", recompute=True)
