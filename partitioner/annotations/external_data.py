"""Weights that lie in files beside a model, when the model is written somewhere else."""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto, TensorProto

from partitioner.frontends.onnx.checks import all_tensors


def relocate(model: ModelProto, folder: Path | None, target: Path) -> dict[Path, Path]:
    """Make references to external files hold from the folder of `target`, in place.

    Files in that folder, or below it, are referred to where they are (ONNX allows no way up).
    The others are to be copied beside `target`, under its name.

    Args:
        model: Changed in place.
        folder: Where its references hold now; None without any.
        target: The model file to be.

    Returns:
        The file to copy, by the file to make.
    """
    outside = [t for t in all_tensors(model) if t.data_location == TensorProto.EXTERNAL]
    entries = [entry for t in outside for entry in t.external_data if entry.key == "location"]
    if folder is None:
        return {}
    copies: dict[Path, Path] = {}
    locations: dict[str, str] = {}
    for location in dict.fromkeys(entry.value for entry in entries):
        file = folder / location
        try:
            locations[location] = file.resolve().relative_to(target.parent.resolve()).as_posix()
        except ValueError:  # there is no way down to the file
            place = target.with_name(f"{target.name}.{len(copies)}.data")
            copies[place] = file
            locations[location] = place.name
    for entry in entries:
        entry.value = locations[entry.value]
    return copies
