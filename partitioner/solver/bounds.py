"""Bounds with the methods that proved them: a plan that costs less refutes some."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Bounds:
    """The highest bound of each method; a MILP solver proves too much now and then."""

    by_method: dict[str, float] = field(default_factory=dict)

    def add(self, bound: float, method: str) -> None:
        """Keep a method's bound if it is its highest."""
        self.by_method[method] = max(bound, self.by_method.get(method, 0.0))

    def without_those_above(self, cost: float) -> tuple[float, str]:
        """Drop the bounds above the cost of a plan; return the highest that is left."""
        self.by_method = {m: bound for m, bound in self.by_method.items() if bound <= cost}
        method = max(self.by_method, key=self.by_method.__getitem__, default="none")
        return self.by_method.get(method, 0.0), method
