"""Compile a model into per-device subgraphs with the communication inserted.

>>> import partitioner
>>> partitioner.compile  # doctest: +SKIP
<function compile at ...>

Names are loaded on first use (PEP 562): `import partitioner` alone loads no
solver, no front end and no runtime, so that `partition --help` and every rank
process start fast.
"""

from importlib import import_module

#: True for type checkers; that of `typing`, whose import takes longer than all that a command
#: imports before it notes interrupts.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from partitioner.api.compiled.base import Compiled
    from partitioner.api.compiled.module import ModuleProgram
    from partitioner.api.compiled.reload import load
    from partitioner.api.compiler import compile, dump_problem
    from partitioner.api.fitting import fit
    from partitioner.api.profiling.calibrate import calibrate
    from partitioner.api.profiling.profile import profile
    from partitioner.api.sweeping import sweep
    from partitioner.api.verify.compare import Verification
    from partitioner.backends.torch.by_hand.chain import Chain
    from partitioner.cost_model.cluster.topology import Cluster
    from partitioner.frontends.torch.with_loss import with_loss
    from partitioner.ir.errors import OptionError, PartitionerError
    from partitioner.ir.plan import Plan
    from partitioner.solver.outcome import Infeasible
    from partitioner.strategies.constraints import Constraints

__all__ = [
    "Chain",
    "Cluster",
    "Compiled",
    "Constraints",
    "Infeasible",
    "ModuleProgram",
    "OptionError",
    "PartitionerError",
    "Plan",
    "Verification",
    "__version__",
    "calibrate",
    "compile",
    "dump_problem",
    "fit",
    "load",
    "profile",
    "sweep",
    "with_loss",
]

__version__ = "0.1.0.dev0"

_HOME = {
    "Chain": "partitioner.backends.torch.by_hand.chain",
    "Cluster": "partitioner.cost_model.cluster.topology",
    "Compiled": "partitioner.api.compiled.base",
    "Constraints": "partitioner.strategies.constraints",
    "Infeasible": "partitioner.solver.outcome",
    "ModuleProgram": "partitioner.api.compiled.module",
    "OptionError": "partitioner.ir.errors",
    "PartitionerError": "partitioner.ir.errors",
    "Plan": "partitioner.ir.plan",
    "Verification": "partitioner.api.verify.compare",
    "calibrate": "partitioner.api.profiling.calibrate",
    "compile": "partitioner.api.compiler",
    "dump_problem": "partitioner.api.compiler",
    "fit": "partitioner.api.fitting",
    "load": "partitioner.api.compiled.reload",
    "profile": "partitioner.api.profiling.profile",
    "sweep": "partitioner.api.sweeping",
    "with_loss": "partitioner.frontends.torch.with_loss",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use.

    Raises:
        AttributeError: `name` is not a public name of the package.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'partitioner' has no attribute {name!r}")
    from partitioner.backends.runtimes import naming_runtimes

    with naming_runtimes():
        value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
