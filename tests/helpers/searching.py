"""A whole search in one call."""

from typing import Any

from partitioner.cost_model.cluster import Cluster
from partitioner.ir.graph import Graph
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import Outcome
from partitioner.search.request import Budget, Request


def search(graph: Graph, cluster: Cluster, request: Request, **budget: Any) -> Outcome:
    """The best plan by a request, silently; `budget` replaces parts of the request's own."""
    silent = Budget.of(request, lambda _text: None)
    return find_plan(graph, cluster, request, Budget(**{**vars(silent), **budget}))
