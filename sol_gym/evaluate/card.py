"""A problem's card: what it computes, on what, how much work that is, and the times to beat.

The card is data; `sol-gym problems show` prints it. Bounds are our analyzer's and are computed
here, with the reference run on tensors without content; published figures are looked up.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from .. import baselines
from ..device import Device
from ..errors import BoundError
from ..problem import Definition, Pack, Problem, Tolerance, Workload


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TensorCard(_Record):
    """One input or output."""

    name: str
    shape: tuple[str, ...] | None
    """Axis names or expressions; None for a Python number."""
    dtype: str
    unread: bool = False
    """Whether no output depends on it."""


class WorkloadCard(_Record):
    """One workload with its sizes, work and times."""

    index: int
    uuid: str
    axes: dict[str, int]
    input_bytes: int
    output_bytes: int
    reference_peak_bytes: int | None
    """What the reference's own tensors take at once, its outputs included; an estimate."""
    tolerance: Tolerance
    read_bytes: int | None = None
    """Of the inputs, what any kernel has to read."""
    written_bytes: int | None = None
    """What any kernel has to write."""
    flops: int | None = None
    """Contraction work that any kernel has to do, 2 for a multiply-add."""
    t_sol_ms: float | None = None
    """Our bound on the device."""
    bound_by: str | None = None
    bound_complete: bool | None = None
    published_t_sol_ms: float | None = None
    """Published figures are of a B200 at 1,500 MHz, and shown for no other device."""
    t_b_ms: float | None = None
    """The scoring baseline: published for a B200, measured for others; None where there is none."""

    @property
    def needed_bytes(self) -> int | None:
        """Device memory to check one candidate: inputs, its outputs and the reference's tensors."""
        if self.reference_peak_bytes is None:
            return None
        return self.input_bytes + self.output_bytes + self.reference_peak_bytes


class Card(_Record):
    """A problem as a kernel author wants to see it."""

    id: str
    title: str
    description: str
    """What the reference says about itself: arguments, results, rounding."""
    source_model: str | None
    family: str
    direction: str
    precision: str
    profile: str
    device: str
    constants: dict[str, int | str]
    """Axes that no workload binds: values, or expressions over other axes."""
    inputs: tuple[TensorCard, ...]
    outputs: tuple[TensorCard, ...]
    notes: tuple[str, ...]
    """Traps: discarded work, degenerate outputs, data-dependent work."""
    recipes: dict[str, str]
    """Other ways to draw the inputs, by name."""
    strict: tuple[str, ...]
    """Inputs that the strict profile varies, with how."""
    workloads: tuple[WorkloadCard, ...]
    remarks: tuple[str, ...] = ()
    """What could not be found out."""


def make_card(
    problem: Problem,
    device: Device,
    *,
    bounds: bool = True,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Card:
    """The card of a problem.

    Args:
        problem: its reference is run (on tensors without content) unless `bounds` is False.
        device: for the times; need not be present.
        bounds: whether to compute our bounds.
        on_progress: told (stage, done, total).
    """
    pack, definition = problem.pack or Pack(id=problem.id, title=""), problem.definition
    remarks: list[str] = []
    baseline = baselines.lookup(device.key)
    peaks = _reference_peaks(problem)
    cards = []
    for index, workload in enumerate(problem.workloads):
        on_progress("bounds", index, len(problem.workloads))
        times: dict[str, object] = {}
        if row := _published(problem, workload, device):
            times |= {"published_t_sol_ms": row.t_sol_ms, "t_b_ms": row.t_b_ms}
        elif measured := baseline.get(problem.workload_hash(workload)):
            times["t_b_ms"] = measured.t_b_ms
        if bounds:
            times |= _bound(problem, workload, device, remarks)
        cards.append(
            WorkloadCard(
                index=index,
                uuid=workload.uuid,
                axes=workload.axes,
                input_bytes=sum(t.nbytes for t in problem.tensors(workload).values()),
                output_bytes=sum(t.nbytes for t in problem.outputs(workload).values()),
                reference_peak_bytes=peaks.get(workload.uuid),
                tolerance=workload.tolerance,
                **times,  # type: ignore[arg-type]
            )
        )
    return Card(
        id=problem.id,
        title=pack.title or definition.name,
        description=_description(problem),
        source_model=pack.source_model,
        family=pack.family or definition.op_type or "",
        direction=pack.direction,
        precision=pack.precision,
        profile=problem.profile,
        device=device.key,
        constants=_constants(definition),
        inputs=tuple(
            TensorCard(
                name=name,
                shape=None if spec.shape is None else tuple(spec.shape),
                dtype=spec.dtype,
                unread=name in pack.unread_inputs,
            )
            for name, spec in definition.inputs.items()
        ),
        outputs=tuple(
            TensorCard(name=name, shape=tuple(spec.shape or ()), dtype=spec.dtype)
            for name, spec in definition.outputs.items()
        ),
        notes=(*pack.notes, *_declared(pack)),
        recipes={name: recipe.description for name, recipe in pack.recipes.items()},
        strict=tuple(f"{name}: {hint}" for name, hint in pack.strict.items()),
        workloads=tuple(cards),
        remarks=tuple(remarks),
    )


def _constants(definition: Definition) -> dict[str, int | str]:
    constants: dict[str, int | str] = {}
    for name, axis in definition.axes.items():
        if axis.type == "const":
            constants[name] = axis.value
        elif axis.type == "expr":
            constants[name] = axis.expression
    return constants


def _description(problem: Problem) -> str:
    """The docstrings of the reference and of its `run`, or else the definition's description."""
    try:
        module = ast.parse(problem.reference)
    except SyntaxError:
        return problem.definition.description or ""
    texts = [ast.get_docstring(module)]
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            texts.append(ast.get_docstring(node))
    return "\n\n".join(t for t in texts if t) or problem.definition.description or ""


def _declared(pack: Pack) -> list[str]:
    """What pack.json declares for the checks, as sentences."""
    sentences = [
        f"The published reference overwrites {source} and returns it as {output}; here the output "
        "is a tensor of its own, and inputs must be left alone."
        for output, source in pack.published_aliases.items()
    ]
    sentences += [f"{name} is zero whatever the inputs." for name in pack.zero_outputs]
    if pack.rounding_sensitive:
        sentences.append(f"Sensitive to every rounding: {pack.rounding_sensitive}")
    return sentences


def _reference_peaks(problem: Problem) -> dict[str, int | None]:
    """By uuid, since a problem may have a part of its workloads; the smoke profile has none."""
    from ..problems import list_ids, load, reference_peak_bytes

    if problem.profile != "full" or problem.id not in list_ids():
        return {}
    uuids = [w.uuid for w in load(problem.id).workloads]
    return dict(zip(uuids, reference_peak_bytes(problem.id) or [], strict=False))


def _published(
    problem: Problem, workload: Workload, device: Device
) -> baselines.PublishedRow | None:
    from ..problems import list_ids, load

    if not device.key.startswith("b200") or problem.profile != "full":
        return None
    rows = baselines.published(problem.id)
    if rows is None or problem.id not in list_ids():
        return None
    uuids = [w.uuid for w in load(problem.id).workloads]
    return rows[uuids.index(workload.uuid)] if workload.uuid in uuids else None


def _bound(
    problem: Problem, workload: Workload, device: Device, remarks: list[str]
) -> dict[str, object]:
    from .bounds import least_bound

    try:
        bound = least_bound(problem, workload, device)
    except BoundError as error:
        remarks.append(f"workload {workload.uuid}: no bound: {error}")
        return {}
    remarks.extend(note for note in bound.notes if note not in remarks)
    return {
        "t_sol_ms": bound.t_sol_ms,
        "bound_by": bound.bound_by,
        "bound_complete": bound.complete,
        "read_bytes": sum(bound.read_bytes.values()),
        "written_bytes": sum(bound.write_bytes.values()),
        "flops": bound.flops,
    }
