"""From work and traffic to a time: the roofline, one roof per unit."""

from __future__ import annotations

from typing import NamedTuple

from ..device import Device

ADVISORY_UNITS = frozenset(("fp32_fma",))
"""Shown, but not part of the bound (see `Bound.compute_ms`)."""


class Times(NamedTuple):
    """What each roof takes, in milliseconds, and the largest."""

    t_sol_ms: float
    bound_by: str
    memory_ms: float
    compute_ms: dict[str, float]
    """By unit."""
    capacity_ms: float | None


def roofline(
    device: Device, total_bytes: int, work: dict[str, int], capacity_bytes: float = 0.0
) -> Times:
    """The largest of the times of memory, capacity, units and launch.

    Args:
        device: peak rates.
        total_bytes: compulsory traffic.
        work: floating-point operations by unit.
        capacity_bytes: least traffic that the on-chip capacity allows; 0 if that says nothing.
    """
    memory_ms = 1e3 * total_bytes / device.bandwidth_for(total_bytes)
    compute_ms = {unit: 1e3 * flops / device.rate(unit) for unit, flops in work.items()}
    times = {"memory": memory_ms}
    capacity_ms = None
    if capacity_bytes > 0:
        capacity_ms = times["capacity"] = 1e3 * capacity_bytes / device.bandwidth_bytes_per_s
    times |= {f"compute:{u}": t for u, t in compute_ms.items() if u not in ADVISORY_UNITS}
    if device.launch_ms is not None:
        times["launch"] = device.launch_ms
    bound_by = max(times, key=lambda name: times[name])
    return Times(times[bound_by], bound_by, memory_ms, compute_ms, capacity_ms)
