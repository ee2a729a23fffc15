"""Process groups end when they are destroyed: what would hold them longer lets go of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as default_holders


@cache
def free_default_arguments() -> None:
    """Let no function of PyTorch hold the group of all ranks as the default of an argument.

    PyTorch imports `torch.distributed.nn.functional` late, with an optimizer or a trace. If that is
    after `init_process_group`, the defaults hold the group (before it they are None, which means
    the same): it outlives `destroy_process_group`, its threads run on, and one of them that frees a
    tensor while Python shuts down ends the process with SIGABRT.
    """
    for function in vars(default_holders).values():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(defaults, tuple):
            function.__defaults__ = tuple(
                None if isinstance(default, dist.ProcessGroup) else default for default in defaults
            )
    _let_go_when_groups_end()


#: What is called once before the group of all ranks is destroyed.
_LAST_CALLS: list[Callable[[], None]] = []


def call_before_groups_end(last_call: Callable[[], None]) -> None:
    """Call a function once, before the group of all ranks is destroyed, and the others with it."""
    _let_go_when_groups_end()
    _LAST_CALLS.append(last_call)


@cache
def _let_go_when_groups_end() -> None:
    """Free what holds a destroyed group: last calls do, and a collection of cycles.

    Such a cycle is an exception that was caught, with its frames. Without a collection the threads
    of the group run on until Python happens to collect, or shuts down.
    """
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def destroyed(group: Any = None) -> None:
        while _LAST_CALLS and group in (None, dist.group.WORLD):
            _LAST_CALLS.pop()()
        destroy(group)
        gc.collect()

    for module in (dist, c10d):
        module.destroy_process_group = destroyed  # type: ignore[attr-defined]
