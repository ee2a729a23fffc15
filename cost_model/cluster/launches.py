"""Ways to submit the kernels of a GPU, by name: the least time between two kernels of each.

The figures stand in `data/presets.toml`, each with the address of its measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from partitioner.cost_model.cluster.published import data_file

_MICRO_S = 1e-6

#: In the place of a name: what the executor of the programs does (`Executor.submits`).
BY_EXECUTOR = "executor"
#: The name whose time a device has until its executor is known.
BY_DEFAULT = "native"


@dataclass(frozen=True)
class Launches:
    """A way to submit kernels."""

    title: str  #: For people: "CUDA graphs".
    kernel_s: float  #: Least seconds between the starts of two kernels.
    #: Seconds to submit a graph of kernels, where kernels are submitted in graphs.
    graph_s: float = 0.0

    @property
    def in_graphs(self) -> bool:
        """Tell whether kernels are submitted in graphs, recorded once."""
        return self.graph_s > 0


@cache
def launches() -> Mapping[str, Launches]:
    """Get all ways by name."""
    return {
        name: Launches(row["title"], _seconds(row["us"]), _seconds(row.get("graph_us", 0.0)))
        for name, row in data_file("presets.toml")["launches"].items()
    }


def _seconds(us: float | list[float]) -> float:
    """Seconds of microseconds, or of those of several kernels and their number."""
    return float(us[0] / us[1] if isinstance(us, list) else us) * _MICRO_S
