"""`compile` plans a model and lowers the plan to programs; `dump_problem` writes its problem."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from typing_extensions import Unpack

from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxGraphs
from partitioner.api.compiled.plan_cache import PlanCache, plans_folder
from partitioner.api.option_table import CompileOptions, DumpOptions
from partitioner.api.options import open_with, processes, request_of, takes, target_cluster
from partitioner.api.tuning import check_tunable, tuned
from partitioner.api.verify.symbolic.ir_programs import prove_programs
from partitioner.api.verify.symbolic.proof import IN_BLOCKS
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.foundations.files import check_file, refuse_to_replace
from partitioner.foundations.no_gc import no_collection
from partitioner.frontends.model import ModuleInput, OnnxInput
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.ir.errors import OptionError
from partitioner.problem.dump import Dump, write_problem
from partitioner.report.summarise import summarise
from partitioner.search.outcome import Outcome
from partitioner.search.request import MOST_EXPLICIT, Request, StageClock, silent
from partitioner.search.spaces.explicit import first_problem
from partitioner.search.ways.table import Table
from partitioner.solver.milp.pulp_program import program_format
from partitioner.strategies.spaces import SearchError, check_space, families

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.api.compiled.module import ModuleProgram
    from partitioner.api.compiled.module_graphs import ModuleGraphs

CompiledT = TypeVar("CompiledT", bound=Compiled)
#: Most nodes of a model, times ranks, at which `compile` proves its programs: less than a second.
MOST_PROVEN = 2_000


@overload
def compile(  # noqa: A001 - the public name
    model: nn.Module,
    example_inputs: Any,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> ModuleProgram: ...


@overload
def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto,
    example_inputs: None = None,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> Compiled: ...


@takes(CompileOptions)
@no_collection()
def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    devices: int | None = None,
    **options: Unpack[CompileOptions],
) -> Compiled | ModuleProgram:
    """Plan a model over devices and lower the plan to one program a rank.

    Args:
        model: Path of an ONNX file, the ONNX model itself, or a PyTorch module. A module's weights
            may be fake, or on the meta device: it is planned without them. Also a module's
            exported program ("model.pt2"), or "package.module:factory": a function, which is
            called, and returns the module and its example inputs.
        example_inputs: For a module itself: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments.
        devices: Number of devices (default: the cluster's; without one the number of processes of
            torch.distributed or torchrun, or 1).
        **options: As the fields of `CompileOptions` are described.

    Returns:
        The compiled model. A module gives a `ModuleProgram`, which is called like the module, and
        whose `.module()` is each rank's part under torchrun. A path or an ONNX model gives a
        `Compiled`, which for a ".pt2" file or a factory is a `ModuleProgram` as well. Once
        torch.distributed is initialised with as many processes as the plan has devices, all
        processes compile a module together: each traces it, process 0 searches.

    Raises:
        PartitionerError: The model or the constraints are wrong; `OptionError` for an option that
            has no meaning or contradicts another, `Infeasible` if no plan fits the devices' memory.
            Processes that compile together all raise.

    Examples:
        >>> import partitioner
        >>> result = partitioner.compile("resnet50.onnx", devices=4)  # doctest: +SKIP
        >>> result.show()  # doctest: +SKIP
        >>> result.save("resnet50.partition")  # doctest: +SKIP
    """
    clock = StageClock(options.get("progress") or silent)
    cluster, request = check_options(devices, options)
    opened = open_with(model, example_inputs, options)
    if request.tune is not None:
        if options.get("plan_only"):
            raise OptionError("tune runs the plans, which needs the weights: leave plan_only out")
        check_tunable(cluster, is_module=isinstance(opened, ModuleInput))
    cluster = cluster.run_by(opened.executor, training=opened.training)
    graphs = graphs_of(opened, cluster, request, clock)
    folder = plans_folder() if options.get("cache", True) and request.tune is None else None
    cache = None if folder is None else PlanCache(graphs, cluster, request, clock, folder)

    def search() -> tuple[Outcome, Mapping[str, Any]]:
        if cache is not None and (known := cache.read()) is not None:
            return known
        table = Table(graphs, cluster, request, clock)
        outcome = table.best()
        run_notes: tuple[str, ...] = ()
        if request.tune is not None:
            with clock("running the best plans"):
                outcome = tuned(outcome, graphs.compiled, request, cluster, clock.say)
            certificate = outcome.plan.certificate
            count = 0 if certificate is None else len(certificate.trials)
            if count < request.tune:
                plans = "plan" if count == 1 else "different plans"
                fewer = f"fewer than the {request.tune} to run"
                run_notes = (f"the search met {count} {plans}, {fewer}",)
        outcome = table.beside_others(outcome)
        summary = summarise(outcome, cluster, request, (*graphs.notes, *run_notes))
        if cache is not None:
            cache.write(outcome.plan, summary)
        return outcome, summary

    result = graphs.planned(search)
    if len(cluster) <= MOST_EXPLICIT:  # now rather than on first use
        with clock("lowering"):
            result.programs  # noqa: B018 - computed on first use
        if len(result.graph.nodes) * len(cluster) <= MOST_PROVEN:
            with clock("proof"):
                return _with_proof(result)
    return result


def graphs_of(
    opened: OnnxInput | ModuleInput, cluster: Cluster, request: Request, clock: StageClock
) -> OnnxGraphs | ModuleGraphs:
    """The graphs of a model that was opened, by the way that it runs."""
    if isinstance(opened, OnnxInput):
        return OnnxGraphs(opened, cluster, request, clock)
    from partitioner.api.compiled import module_graphs  # loads PyTorch

    return module_graphs.ModuleGraphs(opened, cluster, request, clock)


def _with_proof(result: CompiledT) -> CompiledT:
    """The result, whose summary says that the programs of its ranks compute the model.

    A proof that they compute something else is a warning, too, whoever reads no summary.
    """
    proof = prove_programs(result.graph, result.programs, result.model.rows)
    if proof.refusal is not None and proof.refusal.is_wrong:
        why = "a fault of partitioner, which runs may not show: do not use them, and report it"
        warnings.warn(f"programs of {result.name!r} are {proof.line}: {why}", stacklevel=1)
    if result.plan.blocks:
        proof = replace(proof, notes=(*proof.notes, IN_BLOCKS))
    proven = replace(result, summary={**result.summary, "proof": proof.line})
    vars(proven)["programs"] = result.programs
    return proven


def check_options(devices: int | None, options: Mapping[str, Any]) -> tuple[Cluster, Request]:
    """The devices and the request of the options of `compile`; no model is read."""
    cluster = target_cluster(options, devices, processes())
    request = request_of(options)
    check_space(request.strategy, len(cluster), request.mesh)
    ModuleOptions(options.get("training", False), options.get("optimizer", "adamw"))
    if request.tune is not None:
        check_tunable(cluster, is_module=False)
    return cluster, request


@takes(DumpOptions)
def dump_problem(
    model: str | Path | onnx.ModelProto | nn.Module,
    path: str | Path,
    devices: int | None = None,
    **options: Unpack[DumpOptions],
) -> Dump:
    """Write the problem that `compile` would solve, for other solvers.

    Args:
        model: As of `compile`.
        path: File to write, gzipped if its name ends in `.gz`; an existing one is replaced. A name
            in `.lp` or `.mps` asks for the integer program in that format, as the strategy "inter"
            needs.
        devices: Number of devices (default: the cluster's, or 1).
        **options: As the fields of `DumpOptions` are described.

    Raises:
        PartitionerError: The model or the constraints are wrong, the file cannot be written, or
            the strategy is neither of the two.
    """
    strategy = options["strategy"]
    if strategy in ("auto", "copies"):
        raise SearchError("a problem file holds one problem: give strategy intra or inter")
    say = options.get("progress") or silent
    target = Path(path)
    check_file(target)
    if strategy == "inter" and program_format(target) is None:
        raise SearchError(
            f"{target}: the problem of strategy 'inter' is written as an integer program: give a "
            "name that ends in .lp or .mps"
        )
    cluster = target_cluster(options, devices)
    request = request_of(options)
    families(strategy, len(cluster), request.mesh)  # refuses before anything is read
    spaces, *others = request.over(len(cluster)).on_meshes(len(cluster))
    if others:
        raise SearchError(
            f"a problem file holds one problem: parallel {request.parallel!r} may have several "
            "meshes, give one"
        )
    opened = open_with(model, options.get("example_inputs"), options)
    if opened.path is not None:
        refuse_to_replace(opened.path, target)
    say("reading the model")
    graph = opened.graph
    say("building the problem")
    cluster = cluster.run_by(opened.executor, training=opened.training)
    family, built = first_problem(graph, cluster, spaces.on(graph))
    say(f"writing {target}")
    dumped = write_problem(built.problem, target, str(family))
    if strategy == "inter" or spaces.mesh is not None or len(cluster) == 1:
        return dumped
    one_axis = "no mesh was given: this is the one of a single axis"
    return replace(dumped, notes=(dumped.notes[0], one_axis, *dumped.notes[1:]))
