"""Module programs: verified against the module, saved, loaded, run from their files."""

import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import partitioner
from helpers import factories
from partitioner.api.compiled.folder import rank_files
from partitioner.api.compiled.module import ModuleProgram
from partitioner.api.verify.compare import VerificationError
from partitioner.api.verify.module import random_arguments, verify_module
from partitioner.backends.errors import BackendError
from partitioner.backends.header import Origin
from partitioner.backends.torch.files.rank_files import (
    read_rank_file,
    read_rank_files,
    with_written_phases,
    write_phases,
)
from partitioner.backends.torch.graphs.emit import PassGraph
from partitioner.backends.torch.graphs.phases import RankPhases, emit_phases
from partitioner.backends.torch.local import run_module_files
from partitioner.backends.torch.running.all_ranks import run_lockstep
from partitioner.foundations.files import DirectoryError, ResultError
from partitioner.ir.errors import OptionError
from partitioner.problem.memory_kinds import Holdings


def compiled(module: nn.Module, example: object, **options: object) -> ModuleProgram:
    program = partitioner.compile(module, example, cluster="2xideal", **options)
    assert isinstance(program, ModuleProgram)
    return program


@pytest.fixture(scope="module")
def inference() -> ModuleProgram:
    return compiled(factories.classifier(), factories.batch())


@pytest.fixture(scope="module")
def training() -> ModuleProgram:
    return compiled(
        factories.classifier(training=True), factories.batch(labels=True), training=True
    )


@pytest.fixture(scope="module")
def saved(inference: ModuleProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inference.save(tmp_path_factory.mktemp("saved") / "m.partition")


@pytest.fixture(scope="module")
def saved_training(training: ModuleProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.save(tmp_path_factory.mktemp("saved") / "t.partition")


def test_results_are_verified(inference: ModuleProgram) -> None:
    assert inference.summary["sharded_flops_share"] > 0.9
    verification = inference.verify(seed=3)
    assert verification
    assert [output.name for output in verification.outputs] == ["output['logits']"]
    assert str(verification).startswith("equal: 2 ranks against the whole module, seed 3\n")


def test_gradients_and_written_buffers_are_verified(training: ModuleProgram) -> None:
    before = {name: t.clone() for name, t in training.whole.state_dict().items()}
    drawn = torch.random.get_rng_state()
    verification = training.verify()
    assert verification
    names = [output.name for output in verification.outputs]
    assert names[:2] == ["loss", "output[1]"]
    grads = {f"grad:{name}" for name, _ in training.whole.named_parameters()}
    assert grads == {name for name in names if name.startswith("grad:")}
    assert {name for name in names if name.startswith("buffer:")} == {
        "buffer:norm.running_mean",
        "buffer:norm.running_var",
        "buffer:norm.num_batches_tracked",
    }
    after = training.whole.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in training.whole.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_dropout_is_compared_with_the_program_on_one_device() -> None:
    program = compiled(
        factories.classifier(0.5, training=True), factories.batch(labels=True), training=True
    )
    verification = program.verify()
    assert verification
    text = str(verification)
    assert "against the same program on one device (its dropout is drawn otherwise" in text
    assert any(output.name.startswith("grad:") for output in verification.outputs)


def with_spoilt(
    phases: RankPhases, which: str, operator: str, change: Callable[[fx.Node], None]
) -> RankPhases:
    """The phases of a rank, one of which has other nodes of an operator."""
    (phase,) = (phase for phase in phases.graphs if phases.name(phase) == which)
    graph = spoilt(phases.graphs[phase], operator, change)
    return replace(phases, graphs={**phases.graphs, phase: graph})


def spoilt(part: PassGraph, operator: str, change: Callable[[fx.Node], None]) -> PassGraph:
    """A pass whose only node of an operator was changed."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.module.graph, {}))
    (node,) = (node for node in graph.nodes if str(node.target) == operator)
    change(node)
    return replace(part, module=fx.GraphModule(part.module, graph))


def other_operator(node: fx.Node) -> None:
    node.target = torch.ops.aten.amax.default


def other_threshold(node: fx.Node) -> None:
    node.update_arg(2, 1e9)


def scaled_by_frequency(node: fx.Node) -> None:
    node.update_arg(4, True)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("which", "operator", "change", "where"),
    [
        ("forward", "aten.mean.dim", other_operator, "[x, -] on x=2 on 0,1, wrong on rank 1"),
        (
            "backward",
            "aten.threshold_backward.default",
            other_threshold,
            "[-, x] on x=2 on 0,1, wrong on rank 1",
        ),
        (
            "backward",
            "aten.embedding_dense_backward.default",
            scaled_by_frequency,
            "[-, x] on x=2 on 0,1, wrong on rank 1",
        ),
    ],
)
def test_a_wrong_program_is_found_out(
    training: ModuleProgram,
    saved_training: Path,
    written: bool,
    which: str,
    operator: str,
    change: Callable[[fx.Node], None],
    where: str,
) -> None:
    """Rank 1 computes something else, in the emitted graphs or in those of the files."""
    all_ranks = training.ranks.all_ranks
    ranks = all_ranks.ranks
    if written:
        ranks = [with_written_phases(saved_training, phases) for phases in ranks]
    ranks[1] = with_spoilt(ranks[1], which, operator, change)
    changed = all_ranks.with_phases([[phases] for phases in ranks])
    verification = verify_module(training.model.module, changed, 0)
    assert not verification
    differ = [output.name for output in verification.outputs if not output.equal]
    assert ("loss" in differ) == (which == "forward")
    assert any(name.startswith("grad:") for name in differ)
    assert str(verification).startswith("DIFFERENT: ")
    name = operator.removesuffix(".default").replace("aten.", "aten::")
    (node,) = (node for node in training.graph.nodes if node.op == name)
    assert (
        f"first tensor that differs: {node.outputs[0]!r} of {node.name!r} ({name}), "
        f"{where}, relative error "
    ) in str(verification)


@pytest.mark.parametrize(("factor", "equal"), [(1.0, True), (0.94, False)])
def test_bfloat16_allows_what_rounding_does(factor: float, equal: bool) -> None:
    """An error of some hundredths is found."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    program = compiled(net.to(torch.bfloat16), x.to(torch.bfloat16))

    def scale(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            scaled = node.graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
        node.replace_all_uses_with(scaled, lambda user: user is not scaled)

    all_ranks = program.ranks.all_ranks
    changed = all_ranks.with_phases(
        [[with_spoilt(phases, "forward", "aten.relu.default", scale)] for phases in all_ranks.ranks]
    )
    verification = verify_module(program.model.module, changed, 0)
    assert bool(verification) == equal, str(verification)
    assert verification.outputs[0].tolerance < 0.05
    assert ("first tensor that differs: 'addmm_1'" in str(verification)) != equal


@pytest.mark.parametrize("parallel", [None, "dp"])
def test_what_a_device_holds_adds_up_to_its_peak(parallel: str | None) -> None:
    module, batch = factories.classifier(training=True), factories.batch(labels=True)
    program = compiled(module, batch, training=True, parallel=parallel)
    holdings = Holdings.of(program.graph, program.plan, program.cluster)
    for device, peak in program.evaluation.peak.items():
        parts = holdings.at_peak(device)
        assert sum(parts.values()) == pytest.approx(peak.bytes, abs=len(parts))
        resident = ("parameters", "optimizer's state", "zeros")
        assert sum(parts.get(kind, 0) for kind in resident) == peak.resident_bytes
        if parallel == "dp":  # each device has the whole gradients
            assert parts["gradients"] > 0
            assert " gradients" in holdings.text(device)


def test_random_arguments_leave_the_examples_as_they_are() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0, 5.0]], dtype=torch.float64)
    before = x.clone()
    program = partitioner.compile(nn.Linear(4, 2).double(), x, cluster="2xideal")
    (drawn,), _ = random_arguments(program.model.module, 5)
    assert not torch.equal(drawn, before)
    assert torch.equal(x, before)


def test_random_arguments_are_like_the_examples(inference: ModuleProgram) -> None:
    (ids,), kwargs = random_arguments(inference.model.module, 5)
    assert kwargs == {}
    (example,) = factories.batch()
    assert ids.shape == example.shape
    assert not torch.equal(ids, example)
    assert torch.equal(ids.reshape(-1).sort().values, example.reshape(-1).sort().values)


def test_what_random_arguments_keep() -> None:
    """Classes, shares, signs, masks: random inputs stay valid inputs of a loss."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, **of: torch.Tensor) -> torch.Tensor:
            y = self.dense(x)
            attended = (y + of["mask"]).softmax(1)
            losses = (
                functional.binary_cross_entropy(y.sigmoid(), of["share"]),
                functional.cross_entropy(y, of["classes"]),
                functional.margin_ranking_loss(y, attended, of["signs"]),
                (torch.bucketize(y, of["bounds"]) * y + of["scale"].log() + of["ones"]).mean(),
            )
            return torch.stack(losses).sum()

    torch.manual_seed(0)
    examples = {
        "x": torch.randn(4, 8),
        "mask": torch.zeros(8, 8).fill_(-torch.inf).triu(1)[:4],
        "share": torch.rand(4, 8),
        "classes": torch.randint(8, (4,)),
        "signs": torch.randn(4, 8).sign(),
        "bounds": torch.linspace(-1, 1, 5),
        "scale": torch.tensor(300.0),
        "ones": torch.ones(4, 8),
    }
    program = compiled(Losses(), examples, training=True)
    drawn, other = (random_arguments(program.model.module, seed)[1] for seed in range(2))
    for name, example in examples.items():
        assert drawn[name].dtype == example.dtype
        assert torch.equal(drawn[name], other[name]) == (name == "bounds")
        if name in ("x", "share", "classes", "signs"):
            assert torch.equal(drawn[name].flatten().sort()[0], example.flatten().sort()[0])
    assert torch.equal(drawn["mask"].isinf(), examples["mask"].isinf())
    for name, least, most in (("mask", 0, 1), ("ones", 0.5, 1), ("scale", 150, 300)):
        finite = drawn[name][drawn[name].isfinite()]
        assert least <= finite.min() <= finite.max() <= most
    verification = program.verify()
    assert verification, str(verification)


def test_structured_results_and_element_types() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 8).to(torch.bfloat16)

        def forward(self, x: torch.Tensor, k: torch.Tensor, *, on: torch.Tensor) -> object:
            y = self.dense(x)
            return [y, {"k": k + 1, "on": on.logical_not(), "none": None}]

    torch.manual_seed(0)
    program = compiled(
        Many(),
        {
            "x": torch.ones(4, 8, dtype=torch.bfloat16),
            "k": torch.arange(4),
            "on": torch.ones(4) > 0,
        },
    )
    verification = program.verify()
    assert verification, str(verification)
    assert [(output.name, output.tolerance > 0) for output in verification.outputs] == [
        ("output[0]", True),
        ("output[1]['k']", False),
        ("output[1]['on']", False),
    ]


@dataclass
class Scored:
    """Results of a module: a tensor among other values."""

    loss: torch.Tensor
    words: dict[str, object]
    sizes: tuple[int, float, None]
    scores: torch.Tensor


torch.export.register_dataclass(Scored)


@pytest.mark.parametrize("training", [False, True])
def test_results_that_are_no_tensors_come_back(training: bool, tmp_path: Path) -> None:
    class Scoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Scored, int]:
            scores = self.dense(x)
            words = {"name": "dense", "ready": True, "none": None}
            loss = scores.square().mean()
            return loss, Scored(loss, words, (x.shape[0], 0.5, None), scores), 3

    whole, x = Scoring(), torch.randn(4, 8)
    program = compiled(whole, x, training=training)
    folder = program.save(tmp_path / "scoring.partition")
    for again in (program, partitioner.load(folder, whole, x)):
        assert isinstance(again, ModuleProgram)
        loss, scored, count = again(x)
        assert count == 3
        assert isinstance(scored, Scored)
        assert scored.words == {"name": "dense", "ready": True, "none": None}
        assert scored.sizes == (4, 0.5, None)
        torch.testing.assert_close((loss, scored.loss), (whole(x)[0], whole(x)[0]))
        torch.testing.assert_close(scored.scores, whole(x)[1].scores)
    assert program.verify()


def test_fake_weights_are_planned_and_not_verified(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = factories.Classifier().eval()
    program = compiled(module, factories.batch())
    with pytest.raises(VerificationError, match="weights or example inputs have no contents"):
        program.verify()
    folder = program.save(tmp_path / "p", plan_only=True)
    assert not (folder / "rank0.pt2").exists()
    assert partitioner.load(folder, module, factories.batch()).plan == program.plan


def test_example_inputs_on_the_meta_device_are_planned_as_others() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        x = torch.randn(16, 64)
    plans = [
        partitioner.compile(module, like, cluster="2xideal").plan
        for like in (x, torch.zeros(16, 64))
    ]
    assert plans[0] == plans[1]


def test_what_would_not_fit_is_refused(
    inference: ModuleProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partitioner.api.verify.compare.free_bytes", lambda: 1000)
    with pytest.raises(VerificationError, match="verifying needs about"):
        inference.verify()


def test_the_files_of_a_program(saved: Path, saved_training: Path) -> None:
    common = {"plan.json", "summary.json", "request.json", "timeline.json", "report.html"}
    common |= {"graph.json"}
    files = {"rank0.pt2", "rank1.pt2", "inputs.npz"}
    assert {p.name for p in saved.iterdir()} == common | files
    backward = {"rank0.backward.pt2", "rank1.backward.pt2"}
    both = common | {"rank0.pt2", "rank1.pt2"} | backward
    assert {p.name for p in saved_training.iterdir()} == both
    file = read_rank_file(saved_training / "rank1.backward.pt2")
    assert (file.header.rank, file.which, file.training) == (1, "backward", True)
    assert file.stored  # parameters are arguments: no weights are in the file
    assert all(path.stat().st_size > 0 for path in saved.glob("rank*"))
    assert json.loads((saved / "request.json").read_text())["kind"] == "module"


def test_a_saved_program_is_loaded_with_its_module(saved: Path, inference: ModuleProgram) -> None:
    again = partitioner.load(saved, factories.classifier(), factories.batch())
    assert isinstance(again, ModuleProgram)
    assert again.plan == inference.plan
    assert again.summary["cost"] == inference.summary["cost"]
    assert again.verify_written(saved)
    assert torch.equal(again(*factories.batch())["logits"], inference(*factories.batch())["logits"])


@pytest.mark.slow
def test_backward_files_are_verified(saved_training: Path) -> None:
    module = factories.classifier(training=True)
    again = partitioner.load(saved_training, module, factories.batch(labels=True))
    verification = again.verify_written(saved_training, seed=4)
    assert verification, str(verification)
    assert any(output.name == "grad:table.weight" for output in verification.outputs)


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (None, None, "its module was given in Python, give it again: partitioner.load"),
        (
            nn.Linear(8, 8),
            torch.ones(2, 8),
            r"example inputs of the module that is given are float32\[2,8\]; the plan is for",
        ),
    ],
)
def test_a_module_that_is_not_there(
    saved: Path, module: nn.Module | None, example: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ResultError, match=message):
        partitioner.load(saved, module, example)


def test_a_module_without_example_inputs(saved: Path) -> None:
    with pytest.raises(OptionError, match="give example_inputs"):
        partitioner.load(saved, factories.classifier())
    with pytest.raises(OptionError, match="example_inputs are of a module: give both"):
        partitioner.load(saved, example_inputs=factories.batch())


def test_other_weights_than_the_files_have(saved: Path) -> None:
    module = factories.classifier()
    nn.init.ones_(module.up.bias)
    again = partitioner.load(saved, module, factories.batch())
    with pytest.raises(
        DirectoryError, match=r"rank0.pt2 holds other weights than the model; give the"
    ):
        again.verify_written(saved)


def test_files_of_another_plan(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    shutil.copytree(saved, folder)
    plan = json.loads((folder / "plan.json").read_text())
    plan["certificate"] = None
    for node in plan["nodes"].values():
        node.clear()
        node["group"] = 0
    (folder / "plan.json").write_text(json.dumps(plan))
    again = partitioner.load(folder, factories.classifier(), factories.batch())
    with pytest.raises(DirectoryError, match=r"rank0.pt2 is not of its plan.json"):
        again.verify_written(folder)


def spoil(name: str, other: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        shutil.copyfile(folder / other, folder / name)

    return run


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (spoil("rank1.pt2", "rank0.pt2"), "rank1.pt2 is not of the plan that rank0.pt2 is of"),
        (spoil("rank1.pt2", "plan.json"), "rank1.pt2: not an archive of torch.export.save"),
        (lambda folder: (folder / "rank1.pt2").unlink(), "No such file"),
    ],
)
def test_wrong_rank_files(
    saved: Path, tmp_path: Path, spoilt: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(saved, folder)
    spoilt(folder)
    with pytest.raises(BackendError, match=message):
        read_rank_files(folder)


def test_passes_that_were_exchanged(saved_training: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    shutil.copytree(saved_training, folder)
    spoil("rank1.backward.pt2", "rank1.pt2")(folder)
    again = partitioner.load(
        folder, factories.classifier(training=True), factories.batch(labels=True)
    )
    with pytest.raises(BackendError, match=r"backward.pt2 is the forward pass of rank 1"):
        again.verify_written(folder)


def test_a_file_has_its_own_order_of_values(training: ModuleProgram, tmp_path: Path) -> None:
    """It may take stored values that its pass does not read, as files once did."""
    all_ranks = training.ranks.all_ranks
    for phases in all_ranks.ranks:
        graphs = {phase: turned(graph, phases.stored) for phase, graph in phases.graphs.items()}
        write_phases(tmp_path, training.programs, replace(phases, graphs=graphs), Origin())
    read = [with_written_phases(tmp_path, phases) for phases in all_ranks.ranks]
    for of, written in zip(all_ranks.ranks, read, strict=True):
        for phase, graph in of.graphs.items():
            assert written.graphs[phase].results == graph.results[::-1]
            assert {*of.stored} <= {*written.graphs[phase].arguments}
    changed = all_ranks.with_phases([[phases] for phases in read])
    assert verify_module(training.model.module, changed, 0)


def turned(part: PassGraph, stored: Sequence[str]) -> PassGraph:
    """A pass with its results in the opposite order, which takes all stored values."""
    graph = fx.Graph()
    results = graph.graph_copy(part.module.graph, {})
    assert isinstance(results, tuple)
    graph.output(results[::-1])
    unread = tuple(name for name in stored if name not in part.arguments)
    with graph.inserting_before(next(iter(graph.nodes))):
        for place in range(len(unread)):
            graph.placeholder(f"unread_{place}")
    module = fx.GraphModule(part.module, graph)
    return PassGraph(module, (*unread, *part.arguments), part.results[::-1])


def test_pytorch_loads_the_files_too(saved: Path, inference: ModuleProgram) -> None:
    files = read_rank_files(saved)
    loaded = {
        rank: torch.export.load(saved / f"rank{rank}.pt2").module(check_guards=False)
        for rank in range(2)
    }
    fed = inference.signature.feed(factories.batch(), {}, 0)
    feeds = {}
    for file in files:
        parts = file.header.inputs
        assert all(parts[name].region is None for name in file.arguments)
        feeds[file.header.rank] = [fed[parts[name].whole] for name in file.arguments]
    results = run_lockstep(loaded, feeds)
    outputs = {
        o.whole: results[0][files[0].results.index(o.value)] for o in files[0].header.outputs
    }
    whole = inference(*factories.batch())["logits"]
    (logits,) = outputs.values()
    assert torch.equal(logits, whole)


@pytest.mark.slow  # the command line runs them too
def test_processes_run_the_files(saved: Path, inference: ModuleProgram) -> None:
    (ids,) = factories.batch()
    done = run_module_files(saved, {"ids": ids.numpy()}, requests=2)
    (logits,) = done.outputs.values()
    whole = inference(ids)["logits"].numpy()
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-6)
    assert done.seconds > 0


def test_what_is_not_run_from_files(saved_training: Path, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="is of a module for training, in micro-batches or that"):
        rank_files(saved_training).run({}, 1)
    with pytest.raises(BackendError, match=r"input 'ids' .* is missing"):
        rank_files(saved).run({}, 1)
    with pytest.raises(BackendError, match="requests is 0"):
        run_module_files(saved, {}, 0)
    program = compiled(factories.classifier(training=True), factories.batch())
    folder = program.save(tmp_path / "p")
    assert rank_files(folder).needs_model


def test_a_failed_save_leaves_nothing(
    inference: ModuleProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no\nspace")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(BackendError, match=r"^rank0.pt2 cannot be exported: no space$"):
        inference.save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_verify_directory_needs_the_module(saved: Path) -> None:
    with pytest.raises(ResultError, match="was given in Python"):
        partitioner.load(saved).verify_written(saved)


def test_a_program_runs_by_the_names_of_its_graph(inference: ModuleProgram) -> None:
    (ids,) = factories.batch()
    (name,), (result,) = inference.graph.inputs, inference.graph.outputs
    outputs = inference.run({name: ids.numpy()})
    assert [*outputs] == [result]
    np.testing.assert_array_equal(outputs[result], inference(ids)["logits"].numpy())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "inputs are none; the module's are ids"),
        (["words"], "inputs are words; the module's are ids"),
        (["ids", "words"], "inputs are ids, words; the module's are ids"),
    ],
)
def test_a_run_with_other_inputs_is_refused(
    inference: ModuleProgram, names: list[str], message: str
) -> None:
    (ids,) = factories.batch()
    with pytest.raises(BackendError, match=message):
        inference.run(dict.fromkeys(names, ids.numpy()))


def test_ranks_are_written_one_at_a_time(
    inference: ModuleProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's graph has its part of the weights: together they are as large as the model."""
    alive: list[weakref.ref[fx.GraphModule]] = []

    def emit_and_count(*args: object) -> RankPhases:
        assert not [reference for reference in alive if reference() is not None]
        phases = emit_phases(*args)  # type: ignore[arg-type]
        alive.append(weakref.ref(phases.passes["forward"].module))
        return phases

    monkeypatch.setattr(partitioner.api.compiled.module_ranks, "emit_phases", emit_and_count)
    fresh = inference.model.ranks(inference.programs, inference.plan)
    fresh.write(tmp_path)
    assert len(alive) == 2
    assert [file.header.rank for file in read_rank_files(tmp_path)] == [0, 1]
