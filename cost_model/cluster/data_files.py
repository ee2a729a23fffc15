"""The data files of this folder: TOML, with a source for each figure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def data_file(name: str) -> Mapping[str, Any]:
    """Read a file of `data/`, once a process."""
    folder = resources.files("partitioner.cost_model.cluster").joinpath("data")
    return tomllib.loads(folder.joinpath(name).read_text("utf-8"))
