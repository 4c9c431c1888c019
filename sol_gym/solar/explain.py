"""Finding the reasons of a bound, for who has to write the kernel.

Every input and output with the bytes any kernel has to move, every operation with the work that is
left of it and why, what is dead or unread, which intermediates never leave the chip, and the stages
of the ideal fusion. `explanation` holds the records and their text, `page` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from ..device import Device
from ..errors import BoundError
from ..problem import Problem, Workload
from .analyzer import Precision, Stages, bound_of, run_stages, summarize
from .bound import Bound
from .capacity import (
    Nest,
    attention,
    capacities,
    least_bytes,
    matmul,
    on_chip_bytes,
    search,
)
from .capture import ValuesUnknown
from .demand import Operation
from .explanation import (
    CapacityCurve,
    CapacityPoint,
    Explanation,
    GraphNode,
    IntermediateReport,
    OperationReport,
    TensorReport,
    human_size,
)
from .proof import proof_of
from .region import describe
from .trace import Node, Value, dtype_name
from .work import CONTRACTIONS, as_written, is_contraction

_REDUCING = frozenset(
    (
        *("_softmax", "_safe_softmax", "_log_softmax", "logsumexp", "sum", "mean", "amax", "amin"),
        *("max", "min", "var", "std", "var_mean", "std_mean", "prod", "linalg_vector_norm"),
        *("native_layer_norm", "native_group_norm", "_fused_rms_norm", "cumsum", "topk", "sort"),
        *("argmax", "argmin", "any", "all", "_softmax_backward_data"),
    )
)
_SOFTMAX = frozenset(("_softmax", "_safe_softmax", "_log_softmax"))


def explain(
    problem: Problem,
    workload: Workload,
    device: Device,
    *,
    seed: int = 0,
    precision: Precision = "tolerance",
    published_ms: float | None = None,
    baseline_ms: float | None = None,
) -> Explanation:
    """Analyze a workload and keep the reasons.

    Args:
        problem, workload, device, seed, precision: as in `analyze`.
        published_ms: a published bound to compare with.
        baseline_ms: a published baseline to compare with.

    Raises:
        BoundError: the reference cannot be run, or its course depends on values that cost too much
            to find; `analyze` then still has a (loose) bound.

    Example:
        >>> problem = load("L1/069_rms_norm")
        >>> print(explain(problem, problem.workloads[0], get_device("b200-1500")))
    """
    try:
        stages = run_stages(problem, workload, seed=seed)
    except ValuesUnknown as error:
        raise BoundError(
            f"{problem.id}, workload {workload.uuid}: {error}; only the outputs are certain, so "
            "there is nothing to explain"
        ) from error
    bound = bound_of(summarize(problem, workload, stages), problem, workload, device, precision)
    compute = {u: t for u, t in bound.compute_ms.items() if u != "fp32_fma"}
    unit = max(compute, key=lambda u: compute[u]) if compute else "bf16_tc"
    return Explanation(
        bound=bound,
        device_name=f"{device.name} ({device.key})",
        axes=problem.definition.bind(workload.axes),
        ridge=device.rate(unit) / device.bandwidth_bytes_per_s,
        peak_flops=device.rate(unit),
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        on_chip_bytes=on_chip_bytes(device),
        curve=_curve(stages, bound, device),
        proof=proof_of(problem, workload, device, stages, bound),
        published_ms=published_ms,
        baseline_ms=baseline_ms,
        tensors=tuple(_tensors(problem, workload, stages, bound)),
        operations=tuple(_operations(stages)),
        intermediates=tuple(_intermediates(stages)),
        stages=tuple(_fusion(stages)),
        advice=tuple(_advice(stages, bound, device)),
        graph=tuple(_graph(stages)),
    )


# ---- Tensors ---------------------------------------------------------------------------------


def _tensors(
    problem: Problem, workload: Workload, stages: Stages, bound: Bound
) -> Iterator[TensorReport]:
    for name, arg in problem.tensors(workload).items():
        moved = bound.read_bytes[name]
        region = stages.outcome.read[name]
        if name in stages.known:
            verdict, detail = "known beforehand", "the same in every draw, so it need not be read"
        elif not moved:
            verdict = "unread"
            detail = "no output depends on its elements"
            if not region.exact:
                detail = "what is needed of it could not be followed"
        elif moved < arg.nbytes:
            verdict, detail = "partly read", describe(region)
        else:
            verdict, detail = "read once", ""
        yield TensorReport(
            name=name, role="input", shape=arg.shape, dtype=arg.dtype, size_bytes=arg.nbytes,
            moved_bytes=moved, verdict=verdict, detail=detail,
        )  # fmt: skip
    outputs = problem.outputs(workload)
    for name, moved in bound.write_bytes.items():
        role: Literal["output", "changed in place"] = "output"
        if name not in outputs:
            role = "changed in place"
        arg = outputs[name] if name in outputs else problem.tensors(workload)[name]
        verdict, detail = "written once", ""
        if not moved:
            verdict, detail = "not written", "it is memory that is there already"
        elif moved < arg.nbytes:
            verdict = "partly written"
            detail = "repeats of an expanded view, or slots that stay as they were, cost nothing"
        yield TensorReport(
            name=name, role=role, shape=arg.shape, dtype=arg.dtype, size_bytes=arg.nbytes,
            moved_bytes=moved, verdict=verdict, detail=detail,
        )  # fmt: skip


# ---- Operations ------------------------------------------------------------------------------


def _operations(stages: Stages) -> Iterator[OperationReport]:
    names = stages.trace.names()
    reports: dict[tuple, OperationReport] = {}
    for operation in stages.outcome.operations:
        report = _operation(stages, operation, names)
        # Loops repeat themselves; names differ, all else is the same.
        key = (report.operation, report.result, report.line, report.status, report.unit, report.why)
        old = reports.get(key)
        if old is not None:
            report = old.model_copy(
                update={
                    "count": old.count + 1,
                    **{
                        k: getattr(old, k) + getattr(report, k)
                        for k in ("elements", "demanded", "as_written_flops", "flops")
                    },
                }
            )
        reports[key] = report
    yield from reports.values()


def _operation(stages: Stages, operation: Operation, names: dict[int, str]) -> OperationReport:
    node, work = operation.node, operation.work
    out = _result(node)
    written = as_written(node)
    elements = out.numel if out is not None else 0
    demanded = operation.results
    status: Literal["needed", "partly needed", "dead"] = "needed"
    if operation.demand is None:
        status = "dead"
    elif demanded < elements:
        status = "partly needed"
    flops = work.flops if work else 0
    return OperationReport(
        operation=node.name,
        arguments=", ".join(_argument(v, names) for v in node.inputs),
        result=f"{list(out.shape)} {dtype_name(out.dtype)}" if out is not None else "",
        line=node.line,
        count=1,
        status=status,
        elements=elements,
        demanded=demanded,
        as_written_flops=written,
        flops=flops,
        unit=work.unit if work and flops else "",
        why=_why(stages, operation, written, flops),
    )


def _why(stages: Stages, operation: Operation, written: int, flops: int) -> str:
    """Why a contraction's work is less than was written, or why an operation is not needed."""
    node, demand = operation.node, operation.demand
    if demand is None:
        return _why_dead(stages, node)
    if operation.rewrite:
        return operation.rewrite
    if not written or flops >= written:
        return ""
    factors = [f for f in (stages.facts.at(node, v) for v in node.inputs[-2:])]
    if not flops and any(f.scan or f.triangular for f in factors):
        return "a triangular product: a scan does it with less"
    if not flops:
        return "one product for each result: a selection, or elementwise"
    reasons = []
    if not demand.firm.is_full:
        reasons.append(f"of its result {describe(demand.firm)}")
    if demand.share < 1.0:
        reasons.append(f"a scattered mask leaves {demand.share:.3g} of it")
    if any(f.rest == 0.0 and not f.live.is_full for f in factors):
        reasons.append("products with zeros (masked or padded elements) do not count")
    if node.name.startswith("convolution") and not reasons:
        reasons.append("taps on padding do not count")
    return f"{flops / written:.4g} of it: " + ("; ".join(reasons) or "the rest is masked")


def _why_dead(stages: Stages, node: Node) -> str:
    out = _result(node)
    known = out is not None and bool(node.fresh) and stages.facts.of(out, 0).constant
    return "its values are known beforehand" if known else "no output depends on it"


def _result(node: Node) -> Value | None:
    return next((o for o in (*node.outs, *node.written) if o is not None), None)


def _argument(value: Value, names: dict[int, str]) -> str:
    return f"{names.get(id(value.base), 'constant')} {list(value.shape)}"


def _intermediates(stages: Stages, most: int = 12) -> list[IntermediateReport]:
    returned = {id(v.base) for v in stages.trace.outputs}
    uses: dict[int, int] = {}
    for operation in stages.outcome.operations:
        if operation.demand is not None:
            for base in {id(v.base) for v in operation.node.inputs}:
                uses[base] = uses.get(base, 0) + 1
    found = []
    for operation in stages.outcome.operations:
        node = operation.node
        if operation.demand is None:
            continue
        for out in node.fresh:
            if id(out.base) in returned or not uses.get(id(out.base)):
                continue
            found.append(
                IntermediateReport(
                    made_by=node.name, line=node.line, shape=out.shape,
                    dtype=dtype_name(out.dtype), size_bytes=out.numel * out.dtype.itemsize,
                    uses=uses[id(out.base)],
                )
            )  # fmt: skip
    return sorted(found, key=lambda i: i.size_bytes, reverse=True)[:most]


# ---- The ideal fusion ------------------------------------------------------------------------


def _fusion(stages: Stages, most: int = 24) -> Iterator[str]:
    """Live operations by the contraction they come after: prologue, contraction, epilogue."""
    level: dict[int, int] = {}
    groups: dict[int, list[Node]] = {}
    for operation in stages.outcome.operations:
        node = operation.node
        if operation.demand is None:
            continue
        here = max((level.get(id(v.base), 0) for v in node.inputs), default=0)
        if operation.work is not None and operation.work.flops:
            here += 1
        groups.setdefault(here, []).append(node)
        for out in (*node.fresh, *node.written):
            level[id(out.base)] = max(here, level.get(id(out.base), 0))
    if list(groups) == [0] or not groups:
        yield f"one pass over the inputs: {_chain(groups.get(0, []))}"
        return
    for here in sorted(groups)[:most]:
        nodes = groups[here]
        if here == 0:
            yield f"prologue, computed as the first operands are loaded: {_chain(nodes)}"
            continue
        products = [n for n in nodes if is_contraction(n)]
        rest = [n for n in nodes if not is_contraction(n)]
        text = f"contraction level {here}: {_products(products)}"
        if rest:
            text += f"; then, while its results are on the chip: {_chain(rest)}"
        yield text
    if len(groups) > most:
        yield f"and {len(groups) - most} more levels"


def _chain(nodes: Sequence[Node]) -> str:
    names: list[tuple[str, int]] = []
    for node in nodes:
        name = node.plain_name.lstrip("_").removesuffix("_copy")
        if name == "to":
            name = "cast"
        if names and names[-1][0] == name:
            names[-1] = (name, names[-1][1] + 1)
        else:
            names.append((name, 1))
    shown = [n if c == 1 else f"{n} x{c}" for n, c in names]
    if len(shown) > 24:
        shown = [*shown[:16], f"... {len(shown) - 22} more ...", *shown[-6:]]
    return ", ".join(shown) or "nothing"


def _products(nodes: Sequence[Node]) -> str:
    shapes: dict[str, int] = {}
    for node in nodes:
        text = f"{node.name} " + " x ".join(str(list(v.shape)) for v in node.inputs[-2:])
        shapes[text] = shapes.get(text, 0) + 1
    shown = [f"{text} (x{n})" if n > 1 else text for text, n in shapes.items()]
    return "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")


def _advice(stages: Stages, bound: Bound, device: Device) -> Iterator[str]:
    live = [o for o in stages.outcome.operations if o.demand is not None]
    bandwidth = device.bandwidth_bytes_per_s
    spare = bound.unfused_bytes - bound.total_bytes
    if spare > 0:
        yield (
            f"Fuse: one kernel an operation moves {human_size(bound.unfused_bytes)}, the bound "
            f"{human_size(bound.total_bytes)}; the difference is {1e3 * spare / bandwidth:.4g} ms."
        )
    readers: dict[str, int] = {}
    bases = {id(v.base): n for n, v in stages.trace.inputs.items()}
    for operation in live:
        for base in {id(v.base) for v in operation.node.inputs} & bases.keys():
            readers[bases[base]] = readers.get(bases[base], 0) + 1
    again = [n for n, count in readers.items() if count > 1 and bound.read_bytes.get(n, 0) > 2**20]
    if again:
        yield (
            f"Read once: {', '.join(again)} {'is' if len(again) == 1 else 'are'} used by several "
            "operations; load each element once for all of them."
        )
    made_by: dict[int, Operation] = {}
    contracted: set[int] = set()
    for operation in live:
        node = operation.node
        upstream = any(id(v.base) in contracted for v in node.inputs)
        if operation.work is not None and operation.work.flops:
            upstream = True
        for out in (*node.fresh, *node.written):
            made_by[id(out.base)] = operation
            if upstream:
                contracted.add(id(out.base))
    soft = [
        o for o in live
        if o.node.plain_name in _SOFTMAX and any(id(v.base) in contracted for v in o.node.inputs)
    ]  # fmt: skip
    feeding = {
        id(v.base) for o in live if o.work is not None and o.work.flops for v in o.node.inputs
    }
    if soft and feeding & contracted:
        shape = list(soft[0].node.inputs[0].shape)
        yield (
            f"Softmax between contractions (scores {shape}): keep a running maximum and sum a row, "
            "so that scores never leave the chip."
        )
    masked = [
        o
        for o in live
        if o.work is not None and o.work.flops and o.work.flops < 0.95 * as_written(o.node)
    ]
    if masked:
        left = sum(o.work.flops for o in masked if o.work)
        whole = sum(as_written(o.node) for o in masked)
        yield (
            f"Skip what is masked or not asked for: {left:,} of {whole:,} FLOP "
            f"({left / whole:.4g}) of {len(masked)} contractions are needed."
        )
    per_sm = device.shared_bytes_per_sm + device.register_bytes_per_sm
    rows: dict[str, None] = {}
    for operation in live:
        node = operation.node
        if node.plain_name not in _REDUCING or not node.inputs or not node.inputs[0].shape:
            continue
        value, result = node.inputs[0], _result(node)
        if result is None:
            continue
        kept = result.numel if node.plain_name not in _SOFTMAX else value.numel // value.shape[-1]
        size = value.numel // max(kept, 1) * value.dtype.itemsize
        if per_sm and size * kept > 2**20 and size > per_sm:
            rows[
                f"{node.name} (line {node.line}) reduces {human_size(size)} to one value, more than an "
                f"SM holds ({human_size(per_sm)}): combine partial results of several SMs."
            ] = None
    yield from list(rows)[:4]
    dead = [
        o
        for o in stages.outcome.operations
        if o.demand is None and _why_dead(stages, o.node).startswith("no output")
    ]
    if dead:
        names = sorted({f"{o.node.name} (line {o.node.line})" for o in dead})
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        yield f"Leave out: {', '.join(names[:6])}{more}; nothing depends on it."
    if bound.sfu_ms is not None and bound.sfu_ms > bound.t_sol_ms:
        yield (
            f"{bound.sfu_ops:,} special functions take {bound.sfu_ms:.4g} ms on the special-function "
            "units alone, more than the bound: do part of them as polynomials on FMA units."
        )


# ---- Capacity --------------------------------------------------------------------------------


def _curve(stages: Stages, bound: Bound, device: Device) -> CapacityCurve:
    label, nest = _largest(stages)
    schedules = search(nest) if nest is not None else None
    points = []
    for capacity in capacities():
        least = float(bound.total_bytes)
        if bound.external_macs:
            least = max(least, least_bytes(bound.external_macs, bound.external_width, capacity))
        found = schedules.at(capacity) if schedules else None
        points.append(
            CapacityPoint(
                capacity_bytes=capacity,
                bound_bytes=least,
                contraction_bytes=found if found is not None and found < float("inf") else None,
            )
        )
    tiling = ""
    if schedules is not None:
        chosen = schedules.schedule(device.shared_bytes_per_sm or device.l2_bytes)
        if chosen is not None:
            tiles, order = chosen
            sizes = ", ".join(f"{a}={n}" for a, n in tiles.items())
            tiling = f"tiles {sizes}; loops from outside {' '.join(order)}"
    return CapacityCurve(contraction=label, points=tuple(points), tiling=tiling)


def _largest(stages: Stages) -> tuple[str, Nest | None]:
    """The contraction with most work, as a nest; attention where its scores are normalised."""
    best: Operation | None = None
    for operation in stages.outcome.operations:
        if operation.work is None or operation.node.name not in CONTRACTIONS:
            continue
        if best is None or best.work is None or operation.work.flops > best.work.flops:
            best = operation
    if best is None or best.work is None or not best.work.flops:
        return "", None
    node = best.node
    spec = CONTRACTIONS[node.name]
    left, right = node.args[spec.left], node.args[spec.right]
    sizes = dict(zip(spec.left_axes, left.shape, strict=True))
    sizes |= zip(spec.right_axes, right.shape, strict=True)
    width = min(left.dtype.itemsize, right.dtype.itemsize)
    label = f"{node.name} {list(left.shape)} x {list(right.shape)}"
    if _between_softmax(stages, node) and {"m", "n", "k"} <= sizes.keys():
        # Scores [queries, keys] or the weighted sum [queries, head].
        head = min(sizes["k"], sizes["n"])
        keys = max(sizes["k"], sizes["n"])
        return f"one head of {label}, scores on the chip", attention(sizes["m"], keys, head, width)
    m, n, k = (sizes.get(x, 1) for x in "mnk")
    made = matmul(m, n, k, width=width, batch=sizes.get("b", 1))
    return label, made


def _between_softmax(stages: Stages, node: Node) -> bool:
    """Whether a contraction makes the scores of a softmax, or takes its probabilities."""
    source: dict[int, set[int]] = {}
    soft: set[int] = set()
    for operation in stages.outcome.operations:
        n = operation.node
        before: set[int] = set()
        for v in n.inputs:
            before |= source.get(id(v.base), set())
        if n is node and before & soft:
            return True
        if n.plain_name in _SOFTMAX:
            if id(node) in before:
                return True
            soft.add(id(n))
            before = {id(n)}
        elif is_contraction(n):
            before = {id(n)}
        for out in (*n.fresh, *n.written):
            source[id(out.base)] = before
    return False


# ---- The drawing -----------------------------------------------------------------------------


def _graph(stages: Stages, most: int = 60) -> list[GraphNode]:
    """Inputs, contractions, reductions and outputs; chains of other operations as one node."""
    nodes: list[GraphNode] = []
    place: dict[int, int] = {}
    for name, value in stages.trace.inputs.items():
        place[id(value.base)] = len(nodes)
        label = f"{name}\n{list(value.shape)} {dtype_name(value.dtype)}"
        nodes.append(GraphNode(label=label, kind="input", after=()))
    chains: dict[tuple, int] = {}
    for operation in stages.outcome.operations:
        node = operation.node
        after = tuple(sorted({place[id(v.base)] for v in node.inputs if id(v.base) in place}))
        if operation.demand is None:
            kind = "dead"
        elif is_contraction(node):
            kind = "contraction"
        elif node.plain_name in _REDUCING:
            kind = "reduction"
        else:
            kind = "other"
        spot = None
        if kind == "other" and len(after) == 1 and nodes[after[0]].kind == "other":
            spot = after[0]  # continues a chain
        elif (kind, node.name, after) in chains:
            spot = chains[kind, node.name, after]
        if spot is None and len(nodes) - len(stages.trace.inputs) < most:
            out = _result(node)
            label = f"{node.name}\n{list(out.shape) if out is not None else ''}"
            spot = len(nodes)
            nodes.append(GraphNode(label=label, kind=kind, after=after))  # type: ignore[arg-type]
            chains[kind, node.name, after] = spot
        elif spot is not None and kind == "other":
            old = nodes[spot]
            head, _, rest = old.label.partition("\n")
            if len(head) < 40:
                head = f"{head}, {node.name}"
            elif not head.endswith("..."):
                head += " ..."
            nodes[spot] = old.model_copy(update={"label": f"{head}\n{rest}"})
        if spot is not None:
            for out in (*node.fresh, *node.written):
                place[id(out.base)] = spot
    for i, value in enumerate(stages.trace.outputs):
        after = (place[id(value.base)],) if id(value.base) in place else ()
        label = f"output {i}\n{list(value.shape)} {dtype_name(value.dtype)}"
        nodes.append(GraphNode(label=label, kind="output", after=after))
    return nodes


# ---- As text ---------------------------------------------------------------------------------


def _count(shape: Sequence[int]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result
