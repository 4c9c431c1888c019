"""What a bound is made of, as data, and how it reads as text.

`explain` fills these records in; `str()` of an `Explanation` is what `sol-gym sol --explain`
prints; `page` draws one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .bound import Bound
from .proof import Proof


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TensorReport(_Record):
    """One input or output, and what of it any kernel has to move."""

    name: str
    role: Literal["input", "output", "changed in place"]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    moved_bytes: int
    verdict: str
    """`read once`, `unread`, `partly read`, `known beforehand`, `written once`, `not written`."""
    detail: str = ""
    """Which part, or why."""


class OperationReport(_Record):
    """Operations that are alike, as one."""

    operation: str
    arguments: str
    """Names and shapes of the tensors that go in."""
    result: str
    """Shape and dtype."""
    line: int | None
    """Line of the reference."""
    count: int
    """How many alike there are."""
    status: Literal["needed", "partly needed", "dead"]
    elements: int
    """Results as written."""
    demanded: int
    """Results that somebody needs."""
    as_written_flops: int
    flops: int
    """What is left of a contraction."""
    unit: str = ""
    why: str = ""
    """Why less is left than was written."""


class IntermediateReport(_Record):
    """A tensor between operations, which the bound assumes never leaves the chip."""

    made_by: str
    line: int | None
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    uses: int


class CapacityPoint(_Record):
    """Traffic of a workload on a chip that holds so much."""

    capacity_bytes: int
    bound_bytes: float
    """No kernel moves less: compulsory traffic, or the closed form where that is more."""
    contraction_bytes: float | None = None
    """Of the largest contraction alone: the least that any tiling and loop order moves."""


class CapacityCurve(_Record):
    """Traffic as a function of on-chip capacity."""

    contraction: str
    """The largest contraction, whose tilings were searched; empty if there is none."""
    points: tuple[CapacityPoint, ...]
    tiling: str = ""
    """The schedule found for this device's capacity."""


class GraphNode(_Record):
    """A node of the drawing."""

    label: str
    kind: Literal["input", "output", "contraction", "reduction", "other", "dead"]
    after: tuple[int, ...]
    """Positions of the nodes it depends on."""


class Explanation(_Record):
    """A bound with its reasons."""

    bound: Bound
    device_name: str
    axes: dict[str, int]
    ridge: float
    """FLOPs a byte at which the binding unit and memory take equally long."""
    peak_flops: float
    """Rate of the unit that takes longest, or of bf16 where there are no contractions."""
    bandwidth_bytes_per_s: float
    on_chip_bytes: int
    published_ms: float | None = None
    """The published bound of this workload, where there is one for this device."""
    baseline_ms: float | None = None
    """The published scoring baseline, likewise."""
    tensors: tuple[TensorReport, ...]
    operations: tuple[OperationReport, ...]
    intermediates: tuple[IntermediateReport, ...]
    """The largest ones."""
    stages: tuple[str, ...]
    """The ideal fusion, one line a stage."""
    advice: tuple[str, ...]
    graph: tuple[GraphNode, ...]
    curve: CapacityCurve
    proof: Proof
    """All that the bound adds up, with the rules behind it."""

    def __str__(self) -> str:
        return "\n".join(_text(self))


def _text(e: Explanation) -> Iterator[str]:
    b = e.bound
    yield f"{b.problem}, workload {b.workload}, on {e.device_name}"
    yield "axes: " + ", ".join(f"{k}={v}" for k, v in e.axes.items())
    yield ""
    yield f"T_SOL = {b.t_sol_ms:.6g} ms, bound by {b.bound_by}"
    yield (
        f"  memory   {b.memory_ms:.6g} ms = {b.total_bytes:,} bytes at "
        f"{e.bandwidth_bytes_per_s / 1e12:.4g} TB/s"
    )
    for unit, ms in b.compute_ms.items():
        note = "  (advisory, never binds)" if unit == "fp32_fma" else ""
        yield f"  compute  {ms:.6g} ms = {b.work[unit]:,} FLOP on {unit}{note}"
    if b.sfu_ops and b.sfu_ms is not None:
        yield f"  special functions  {b.sfu_ms:.4g} ms for {b.sfu_ops:,} (advisory, never binds)"
    if b.launch_ms is not None:
        yield f"  launch   {b.launch_ms:.4g} ms (an empty kernel, measured)"
    if b.flops:
        yield (
            f"  intensity {b.flops / max(b.total_bytes, 1):.4g} FLOP a byte; memory and compute "
            f"balance at {e.ridge:.4g}"
        )
    yield (
        f"  as written {b.as_written_flops:,} FLOP, needed {b.flops:,}; one kernel an operation "
        f"{b.unfused_bytes:,} bytes, needed {b.total_bytes:,}"
    )
    if e.published_ms is not None:
        yield (
            f"  published bound {e.published_ms:.6g} ms: ours is "
            f"{b.t_sol_ms / max(e.published_ms, 1e-9):.4g} of it"
        )
    if e.baseline_ms is not None:
        yield (
            f"  published baseline {e.baseline_ms:.6g} ms: {e.baseline_ms / b.t_sol_ms:.4g} times "
            f"ours ({b.quality(e.baseline_ms)})"
        )
    complete = "complete" if b.complete else "INCOMPLETE: it holds, but may be loose"
    yield f"  {complete}; values used: {b.lane}"
    yield from (f"  note: {note}" for note in b.notes)
    yield ""
    yield "Tensors: what any kernel has to move"
    for t in e.tensors:
        detail = f" ({t.detail})" if t.detail else ""
        yield (
            f"  {t.role:8} {t.name} {list(t.shape)} {t.dtype}: {t.moved_bytes:,} of "
            f"{t.size_bytes:,} bytes, {t.verdict}{detail}"
        )
    yield ""
    yield "Operations: what is left of them"
    for o in e.operations:
        times = f" x{o.count}" if o.count > 1 else ""
        where = f"line {o.line}: " if o.line else ""
        work = ""
        if o.as_written_flops:
            work = f"; {o.flops:,} of {o.as_written_flops:,} FLOP" + (
                f" on {o.unit}" * bool(o.unit)
            )
        shown: str = o.status
        if o.status == "partly needed":
            shown = f"{o.demanded:,} of {o.elements:,} results needed"
        yield (
            f"  {where}{o.operation}{times}({o.arguments}) -> {o.result}: {shown}{work}"
            + (f"; {o.why}" if o.why else "")
        )
    if e.intermediates:
        yield ""
        yield "Intermediates that never leave the chip (the largest)"
        for i in e.intermediates:
            where = f"line {i.line}: " if i.line else ""
            yield (
                f"  {where}{i.made_by} {list(i.shape)} {i.dtype}, {human_size(i.size_bytes)}, used by "
                f"{i.uses} operation{'s' if i.uses != 1 else ''}"
            )
    yield ""
    yield from _capacity_text(e)
    yield ""
    yield "The ideal fusion"
    yield from (f"  {i}. {line}" for i, line in enumerate(e.stages, 1))
    yield from (f"  - {line}" for line in e.advice)
    yield ""
    yield "The proof"
    yield from (f"  {line}" for line in e.proof.lines())
    faults = e.proof.check()
    yield f"  {'DOES NOT ADD UP: ' + '; '.join(faults) if faults else 'it adds up'}"


def _capacity_text(e: Explanation) -> Iterator[str]:
    yield f"Traffic against on-chip capacity (this device holds {human_size(e.on_chip_bytes)} in all)"
    if e.curve.contraction:
        yield f"  searched: {e.curve.contraction}; with one SM's shared memory: {e.curve.tiling}"
    for p in e.curve.points[4::8]:
        found = human_size(p.contraction_bytes) if p.contraction_bytes is not None else "-"
        yield (
            f"  {human_size(p.capacity_bytes):>9}: no kernel moves less than {human_size(p.bound_bytes)}"
            + (f"; best tiling of that contraction {found}" if e.curve.contraction else "")
        )


def human_size(count: float) -> str:
    """Bytes with four digits and a decimal unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
