"""Which layers to do without on a machine where trusted work does not get through them.

Drivers change, and a layer that holds a candidate may one day hold CUDA. When trusted code fails in
a worker, layers are left out until it works: as few as possible, reported with the reason, and
never because of a fault that passed by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InfrastructureError

SUSPECTS = ("few_devices", "private_folders", "kernel_settings", "seccomp", "landlock")
"""Layers that a driver or a compiler may stumble over, the likeliest first."""

Trial = Callable[[frozenset[str]], str | None]
"""Runs trusted work with layers left out; None if it worked, else what went wrong."""


def layers_in_the_way(trial: Trial, suspects: tuple[str, ...] = SUSPECTS) -> dict[str, str]:
    """Layers to leave out, each with the reason; none if the work gets through after all.

    One at a time first, then all together, of which those come back that are not in the way. Before
    a layer is given up, the work must have failed twice with all of them: a device that was out of
    memory for a moment is no reason, or a candidate could arrange for one.

    Raises:
        InfrastructureError: it fails without all suspects too.
    """
    fault = trial(frozenset())
    if fault is None:
        return {}
    sets = [frozenset({name}) for name in suspects] + [frozenset(suspects)]
    found = next((layers for layers in sets if trial(layers) is None), None)
    if found is None:
        raise InfrastructureError(
            f"trusted code fails in workers, with or without {', '.join(suspects)}: {fault}"
        )
    for name in suspects:
        if len(found) > 1 and name in found and trial(found - {name}) is None:
            found -= {name}
    fault = trial(frozenset())
    return {} if fault is None else {name: f"left out: {fault}" for name in sorted(found)}
