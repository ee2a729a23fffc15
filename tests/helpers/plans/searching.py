"""A search without a budget of its own."""

from typing import Any

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.graph import Graph
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import Outcome
from partitioner.search.request import Budget, Request


def search(graph: Graph, cluster: Cluster, request: Request, **budget: Any) -> Outcome:
    """The outcome of a request; keyword arguments replace fields of its budget."""
    return find_plan(graph, cluster, request, Budget(**{**vars(Budget.of(request)), **budget}))
