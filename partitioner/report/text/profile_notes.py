"""Notes on profiles that do not know the devices or the backend that a plan is made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partitioner.cost_model.cluster.resolve import cpu_fingerprint, device_type, is_of_gpu
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.profiles.database import Profile, default_profile, read_contents, shares

#: Most parts of a profile that a note lists.
_LISTED = 2


def profile_notes(
    cluster: Cluster,
    backend: Callable[[], str],
    *,
    training: bool = False,
    measures_gpus: bool = True,
) -> tuple[str, ...]:
    """A sentence for each profile of a cluster's devices that the plan's costs do not come from.

    Each says what the profile holds instead, and the command that measures. The name of the backend
    is asked for only if there are measurements; GPUs whose operators it does not measure have no
    notes.

    Raises:
        CostError: A profile cannot be read.
    """
    profiles = dict.fromkeys(spec.profile for spec in cluster.devices)
    notes = [
        _notes(cluster, one, backend, training)
        for one in profiles
        if one is not None and (measures_gpus or not is_of_gpu(one.device))
    ]
    return (*(note for of_profile in notes for note in of_profile), *_level_notes(cluster))


def border_notes(cluster: Cluster) -> tuple[str, ...]:
    """A sentence for each profile that knows communications, but no borders of ONNX Runtime."""
    profiles = dict.fromkeys(spec.profile for spec in cluster.devices if spec.border_s is None)
    return tuple(
        f"profile {one.file} does not say what the end of a session of ONNX Runtime adds to a "
        "communication, which counts as nothing: measure with "
        f"{_command(cluster, one, training=False)}"
        for one in profiles
        if one is not None and one.links and one.border is None and not is_of_gpu(one.device)
    )


def _level_notes(cluster: Cluster) -> Iterator[str]:
    for level in cluster.levels[1:]:
        if level.profile is not None and not level.profile.links:
            yield (
                f"profile {level.profile.file} has no communications over level {level.name!r}: "
                "they cost the level's rates; measure with `partition profile` under torchrun"
            )


def _notes(
    cluster: Cluster, profile: Profile, backend: Callable[[], str], training: bool
) -> Iterator[str]:
    device = f"{profile.device}, {shares(profile.processes, profile.threads)}"
    here = cpu_fingerprint()
    is_here = device_type(profile.device) is not None
    measure = _command(cluster, profile, training)
    if not is_here:
        yield f"profile {profile.file} is of {profile.device}; this machine is {here}"
    backends = sorted({entry.backend for entry in profile.entries.values()})
    if backends and (name := backend()) not in backends:
        yield (
            f"profile {profile.file} has measurements of {device} by {', '.join(backends)}, none "
            f"by {name}, which runs this model: measure with {measure}"
        )
    if backends:
        return
    held = read_contents(profile.file)
    if not held:
        yield (
            f"no operator is measured in profile {profile.file}: operators cost the cluster's "
            f"rates; measure with {measure}"
        )
        return
    listed = "; ".join(map(str, held[:_LISTED]))
    more = f" and {len(held) - _LISTED} more" if len(held) > _LISTED else ""
    yield (
        f"profile {profile.file} has {listed}{more}, nothing of {device}: operators cost the "
        f"cluster's rates; measure with {measure}"
    )


def _command(cluster: Cluster, profile: Profile, training: bool) -> str:
    is_local = cluster.name == "local"
    target = f" --devices {len(cluster)}" if is_local else " --cluster FILE"
    file = "" if profile.file == default_profile() or not is_local else f" --profile {profile.file}"
    return f"partition profile MODEL{target}{' --training' if training else ''}{file}"
