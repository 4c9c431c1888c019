"""A bound as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import BoundError

if TYPE_CHECKING:
    from ..device import Device
    from ..problem import Problem
    from .proof import Proof

Quality = Literal["narrow", "ok", "loose", "vacuous"]
_MARKS: tuple[tuple[Quality, float], ...] = (("narrow", 1.25), ("ok", 2.0), ("loose", 10.0))


class Bound(BaseModel):
    """T_SOL of one workload on one device, and what it is made of.

    No correct kernel is faster than `t_sol_ms`. It is the largest of the memory time (compulsory
    traffic over bandwidth), the compute time of each unit, and the launch floor; all of a kernel's
    work is assumed to overlap perfectly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    problem: str
    workload: str
    """The workload's uuid."""
    device: str
    """Key of the device model."""
    t_sol_ms: float = Field(gt=0)
    bound_by: str
    """`memory`, `capacity`, `launch`, or `compute:` with the unit, e.g. `compute:bf16_tc`."""
    memory_ms: float
    compute_ms: dict[str, float]
    """Time of the contraction work on each unit. `fp32_fma` is shown but never binds: vector work
    of depthwise convolutions can also be done on tensor cores, or on packed 16-bit units."""
    launch_ms: float | None = None
    """Time of an empty kernel, where it was measured."""
    read_bytes: dict[str, int]
    """Input name -> bytes any kernel has to read."""
    write_bytes: dict[str, int]
    """Output name (or name of an input changed in place) -> bytes any kernel has to write."""
    work: dict[str, int]
    """Unit -> necessary floating-point operations of contractions, 2 for a multiply-add."""
    lane: Literal["meta", "real"]
    """`meta` if shapes, integers and masks were enough; `real` if floating-point inputs had to be
    drawn and computed with to know what is read."""
    complete: bool
    """False if something was left out for want of knowledge; the bound then holds but is loose."""
    notes: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    """Products that count less because they may be merged or associated in another order."""
    as_written_flops: int = 0
    """FLOPs of all contractions as the reference writes them: dead ones, masked products and
    padding included."""
    unfused_bytes: int = 0
    """Traffic if every operation of the reference read its arguments from memory and wrote its
    result there (views cost nothing)."""
    external_macs: int = 0
    """Multiply-adds of contractions both of whose operands lie in memory (or are elementwise
    functions of what does); these a small chip has to read again."""
    external_width: int = 2
    """Bytes an element of the narrowest of those operands."""
    capacity_ms: float | None = None
    """Time of the least traffic that the device's on-chip capacity allows `external_macs`."""
    sfu_ops: int = 0
    """Demanded exponentials, roots, sigmoids and the like. Advisory: they can be done elsewhere."""
    sfu_ms: float | None = None
    """Time of `sfu_ops` on the special-function units; never part of `t_sol_ms`."""

    @property
    def total_bytes(self) -> int:
        """Compulsory traffic."""
        return sum(self.read_bytes.values()) + sum(self.write_bytes.values())

    @property
    def flops(self) -> int:
        """Contraction work on all units."""
        return sum(self.work.values())

    def proof(self, problem: Problem, device: Device, *, seed: int = 0) -> Proof:
        """All that this bound adds up, line by line, from the reference again (loads torch).

        Args:
            problem: the bound's problem, with its workload.
            device: the model that the bound is for.
            seed: as of the bound.

        Raises:
            BoundError: the problem has no such workload, the reference cannot be run, or it gives
                another bound: the problem, the device or the precision is not this bound's.
        """
        from .proof import prove

        workload = next((w for w in problem.workloads if w.uuid == self.workload), None)
        if workload is None or problem.id != self.problem:
            raise BoundError(
                f"this bound is of {self.problem}, workload {self.workload}, which {problem.id} "
                "does not have"
            )
        for precision in ("tolerance", "declared"):
            proof = prove(problem, workload, device, seed=seed, precision=precision)
            if proof.bound == self:
                return proof
        raise BoundError(
            f"{problem.id} on {device.key} has a bound of {proof.bound.t_sol_ms:.6g} ms, not "
            f"{self.t_sol_ms:.6g}: give the problem, device and seed that it was made with"
        )

    def quality(self, best_ms: float) -> Quality:
        """A mark for the headroom to the best known time.

        Args:
            best_ms: the fastest correct kernel's time on the same device.

        Returns:
            `narrow` up to 1.25 times the bound, `ok` up to 2, `loose` up to 10, else `vacuous`.
        """
        headroom = best_ms / self.t_sol_ms
        return next((mark for mark, limit in _MARKS if headroom <= limit), "vacuous")
