"""The task card: everything an agent is told before its first turn, as one text.

It says what is computed on what, how the answer is called, what counts as right and what the score
means. The reference's source is an observation of its own, so that an agent can show it or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from sol_gym.problem import (
    AxisConst,
    AxisExpr,
    PrecisionPolicy,
    Problem,
    TensorSpec,
    Tolerance,
    Workload,
)

from .feedback import workload_label

__all__ = ["task_card"]

_MAX_WORKLOADS = 64


def task_card(
    problem: Problem,
    *,
    device: str,
    inputs_profile: str,
    max_turns: int,
    target_score: float | None,
) -> str:
    """The prompt for a problem.

    Args:
        problem: with the workloads that will be judged.
        device: what the kernel runs on, in words.
        inputs_profile: `compatible` or `strict`.
        max_turns: how many kernels may be handed in.
        target_score: the score at which the episode ends; None if there is none.
    """
    sections = [
        _task(problem, device),
        _arguments(problem),
        _workloads(problem),
        _answer(problem),
        _correctness(problem, inputs_profile),
        _score(max_turns, target_score),
    ]
    return "\n\n".join(sections) + "\n"


def _task(problem: Problem, device: str) -> str:
    pack, definition = problem.pack, problem.definition
    title = f"{pack.title} ({problem.id})" if pack else problem.id
    lines = [f"# Task: {title}", f"Write the fastest kernel you can for {device}."]
    if definition.description and (pack is None or definition.description != pack.title):
        lines.append(definition.description.strip())
    lines.append("What it must compute is defined by the reference's run().")
    if pack and pack.notes:
        lines += ["Notes:", *(f"- {note}" for note in pack.notes)]
    return "\n".join(lines)


def _arguments(problem: Problem) -> str:
    definition = problem.definition
    lines = ["## Inputs, in call order"]
    lines += [_argument(name, spec) for name, spec in definition.inputs.items()]
    lines += ["## Outputs, in order"]
    lines += [_argument(name, spec) for name, spec in definition.outputs.items()]
    fixed = {n: a.value for n, a in definition.axes.items() if isinstance(a, AxisConst)}
    computed = {n: a.expression for n, a in definition.axes.items() if isinstance(a, AxisExpr)}
    lines.append("## Axes")
    if fixed:
        lines.append("fixed: " + ", ".join(f"{name} = {value}" for name, value in fixed.items()))
    if computed:
        lines.append("computed: " + ", ".join(f"{n} = {e}" for n, e in computed.items()))
    lines.append("given by each workload: " + (", ".join(definition.var_axes) or "none"))
    if definition.constraints:
        lines.append("constraints: " + "; ".join(definition.constraints))
    return "\n".join(lines)


def _argument(name: str, spec: TensorSpec) -> str:
    if spec.shape is None:
        kind = f"{spec.dtype}, a Python number"
    else:
        kind = f"{spec.dtype}[{', '.join(spec.shape)}]"
    text = f"- {name}: {kind}"
    return f"{text} - {spec.description.strip()}" if spec.description else text


def _workloads(problem: Problem) -> str:
    workloads = problem.workloads
    lines = [f"## Workloads ({len(workloads)}; all must pass)"]
    lines += [_workload(i, w) for i, w in enumerate(workloads[:_MAX_WORKLOADS])]
    if len(workloads) > _MAX_WORKLOADS:
        lines.append(f"... and {len(workloads) - _MAX_WORKLOADS} more; {_ranges(problem)}")
    return "\n".join(lines)


def _workload(index: int, workload: Workload) -> str:
    scalars = ", ".join(f"{name}={value}" for name, value in workload.scalars.items())
    label = workload_label(index, workload.axes)
    return f"{label} ({scalars})" if scalars else label


def _ranges(problem: Problem) -> str:
    """The span of each variable axis over all workloads."""
    spans = []
    for name in problem.definition.var_axes:
        values = [workload.axes[name] for workload in problem.workloads]
        spans.append(f"{name} from {min(values)} to {max(values)}")
    return ", ".join(spans)


def _answer(problem: Problem) -> str:
    inputs = ", ".join(problem.definition.inputs)
    outputs = ", ".join(problem.definition.outputs)
    several = len(problem.definition.outputs) > 1
    return "\n".join(
        [
            "## Your answer",
            "Source text alone, or in one Markdown code fence: Python (PyTorch, Triton, or any "
            "kernel DSL that is installed) or C++/CUDA. It must define one of",
            f"    run({inputs})",
            f"        which returns {outputs}" + (", as a tuple" if several else ""),
            f"    run({inputs}, {outputs})",
            "        which writes the outputs into the tensors it is given",
            "Inputs are tensors on the device and must not be changed. Each call must compute its "
            "outputs from its own inputs. Streams, CUDA graphs, threads, torch.compile and "
            "autotuning are allowed.",
        ]
    )


def _precision(policy: PrecisionPolicy) -> str:
    text = f"Operands of matrix products may be rounded to {policy.contraction}"
    if policy.convolution != policy.contraction:
        text += f", those of convolutions to {policy.convolution}"
    return f"{text}; accumulate in float32."


def _correctness(problem: Problem, inputs_profile: str) -> str:
    lines = [
        "## Correctness",
        "An element is right if |out - ref| <= max_atol + max_rtol * |ref|. Outputs are compared "
        "on fresh inputs in several rounds, those of the timed calls included.",
    ]
    if inputs_profile == "strict":
        lines.append(
            "Further rounds draw inputs so that every one matters: no weights of ones or biases of "
            "zeros, rows and columns of very different scale, small and large values, other "
            "numbers for scalar factors. There the error against a float64 run of the reference "
            "must stay near the error that the reference itself makes in its own precision, and no "
            "element may stand out."
        )
        if problem.pack is not None:
            lines.append(_precision(problem.pack.precision_policy))
            if problem.pack.free_axes:
                free = ", ".join(f"`{axis}`" for axis in problem.pack.free_axes)
                lines.append(f"One round is at a size of {free} that is not listed.")
    groups: dict[Tolerance, list[int]] = {}
    for i, workload in enumerate(problem.workloads):
        groups.setdefault(workload.tolerance, []).append(i)
    for tolerance, indices in groups.items():
        where = "all workloads" if len(groups) == 1 else f"workloads {_spans(indices)}"
        lines.append(f"- {where}: {_tolerance(tolerance)}")
    return "\n".join(lines)


def _tolerance(tolerance: Tolerance) -> str:
    text = (
        f"max_atol {tolerance.max_atol:g}, max_rtol {tolerance.max_rtol:g}, for at least "
        f"{100 * tolerance.required_matched_ratio:g} % of the elements"
    )
    if tolerance.max_error_cap is not None:
        text += f", no element off by more than {tolerance.max_error_cap:g}"
    if tolerance.allow_negative_inf:
        text += ", -inf on both sides is a match"
    return text


def _spans(indices: Iterable[int]) -> str:
    """Ascending indices as text, runs shortened: ``#0-#3, #7``."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(f"#{a}" if a == b else f"#{a}-#{b}" for a, b in runs)


def _score(max_turns: int, target_score: float | None) -> str:
    end = "" if target_score is None else f" The episode ends early at a score of {target_score:g}."
    return (
        "## Score\n"
        "Per workload (T_b - T_SOL) / ((T_k - T_SOL) + (T_b - T_SOL)), where T_k is your kernel's "
        "time per call, T_b the time of a good software baseline and T_SOL the hardware's "
        "Speed-of-Light bound: 0.5 at the baseline, 1 at the bound. The problem's score is the "
        "mean over its workloads, 0 unless all pass.\n"
        f"You have {max_turns} turns; after each you get feedback, and the best score counts.{end}"
    )
