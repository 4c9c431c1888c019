"""SOLAR: from a reference to the time no correct kernel can beat.

The parts, in the order data flows through them: `capture` records the reference as a `trace`,
`contents` finds the few real values that matter, `facts` says what is known about every tensor,
`demand` and `dependence` find what has to be read and computed, `work` and `traffic` count it, and
`roofline` turns the counts into a time. `regions` of tensors are what they talk about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bound import Bound

if TYPE_CHECKING:
    from ..device import Device
    from ..problem import Problem, Workload
    from .analyzer import Precision

__all__ = ["Bound", "analyze"]


def analyze(
    problem: Problem,
    workload: Workload,
    device: Device,
    *,
    seed: int = 0,
    precision: Precision = "tolerance",
) -> Bound:
    """T_SOL of a workload on a device; see `sol_gym.solar.analyzer.analyze` (loads torch)."""
    from .analyzer import analyze as run

    return run(problem, workload, device, seed=seed, precision=precision)
