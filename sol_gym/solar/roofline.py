"""From work and traffic to a time: the roofline, one roof per unit."""

from __future__ import annotations

from ..device import Device

ADVISORY_UNITS = frozenset(("fp32_fma",))
"""Shown, but not part of the bound (see `Bound.compute_ms`)."""


def roofline(
    device: Device, total_bytes: int, work: dict[str, int]
) -> tuple[float, str, float, dict[str, float]]:
    """The largest of the times of memory, units and launch.

    Args:
        device: peak rates.
        total_bytes: compulsory traffic.
        work: floating-point operations by unit.

    Returns:
        T_SOL in milliseconds, what binds it, memory time, and compute time by unit.
    """
    memory_ms = 1e3 * total_bytes / device.bandwidth_for(total_bytes)
    compute_ms = {unit: 1e3 * flops / device.rate(unit) for unit, flops in work.items()}
    times = {"memory": memory_ms}
    times |= {f"compute:{u}": t for u, t in compute_ms.items() if u not in ADVISORY_UNITS}
    if device.launch_ms is not None:
        times["launch"] = device.launch_ms
    bound_by = max(times, key=lambda name: times[name])
    return times[bound_by], bound_by, memory_ms, compute_ms
