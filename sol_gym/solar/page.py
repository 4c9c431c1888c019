"""An explanation as one self-contained HTML page: graph, roofline and capacity curve as inline SVG.

Nothing is fetched from anywhere, and no script runs: the page can be mailed, archived and read
offline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from .explanation import Explanation, GraphNode, human_size

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
       color: #1b1f24; background: #fff }
h1 { font-size: 1.35em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { border-bottom: 1px solid #d8dee4; padding: .25em .6em; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
svg { max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
.scroll { overflow-x: auto } .dead { color: #8b949e } li { margin: .3em 0 }
"""
_COLOURS = {
    "input": "#ddf4ff",
    "output": "#dafbe1",
    "contraction": "#ffdfb6",
    "reduction": "#fbefff",
    "other": "#f6f8fa",
    "dead": "#ffffff",
}


def html(explanation: Explanation) -> str:
    """The page."""
    e, b = explanation, explanation.bound
    title = f"{b.problem}: {b.t_sol_ms:.4g} ms on {b.device}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(b.problem)}</h1>",
        f"<p>Workload {escape(b.workload)} on {escape(e.device_name)}: "
        + escape(", ".join(f"{k}={v}" for k, v in e.axes.items()))
        + "</p>",
        f"<p><strong>T<sub>SOL</sub> = {b.t_sol_ms:.6g} ms</strong>, bound by "
        f"{escape(b.bound_by)}. {escape(_comparison(e))}</p>",
        *(f"<p>Note: {escape(note)}</p>" for note in b.notes),
        "<h2>Roofline</h2>",
        roofline_svg(e),
        "<h2>The ideal fusion</h2><ol>",
        *(f"<li>{escape(line)}</li>" for line in e.stages),
        "</ol><ul>",
        *(f"<li>{escape(line)}</li>" for line in e.advice),
        "</ul><h2>Graph</h2><div class='scroll'>",
        graph_svg(e.graph),
        "</div><h2>Traffic against on-chip capacity</h2>",
        capacity_svg(e),
        "<h2>Tensors</h2>",
        *_tensor_table(e),
        "<h2>Operations</h2>",
        *_operation_table(e),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _comparison(e: Explanation) -> str:
    b = e.bound
    text = f"Memory {b.memory_ms:.4g} ms for {b.total_bytes:,} bytes"
    for unit, ms in b.compute_ms.items():
        text += f"; {unit} {ms:.4g} ms for {b.work[unit]:,} FLOP"
    if e.published_ms is not None:
        text += f". Published bound {e.published_ms:.4g} ms"
    if e.baseline_ms is not None:
        text += f", published baseline {e.baseline_ms:.4g} ms"
    return text + "."


def _row(cells: Sequence[tuple[str, bool]], style: str = "") -> str:
    made = "".join(
        f"<td class='n'>{escape(t)}</td>" if n else f"<td>{escape(t)}</td>" for t, n in cells
    )
    return f"<tr class='{style}'>{made}</tr>"


def _head(names: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<th>{escape(n)}</th>" for n in names) + "</tr>"


def _tensor_table(e: Explanation) -> Iterator[str]:
    yield "<table>" + _head(("role", "tensor", "moved", "of", "verdict"))
    for t in e.tensors:
        detail = f" ({t.detail})" if t.detail else ""
        yield _row(
            (
                (t.role, False),
                (f"{t.name} {list(t.shape)} {t.dtype}", False),
                (human_size(t.moved_bytes), True),
                (human_size(t.size_bytes), True),
                (t.verdict + detail, False),
            ),
            "" if t.moved_bytes else "dead",
        )
    yield "</table>"


def _operation_table(e: Explanation) -> Iterator[str]:
    yield "<table>" + _head(("line", "operation", "result", "status", "FLOP", "as written", "why"))
    for o in e.operations:
        count = f" x{o.count}" if o.count > 1 else ""
        yield _row(
            (
                (str(o.line or ""), True),
                (f"{o.operation}{count}({o.arguments})", False),
                (o.result, False),
                (o.status, False),
                (f"{o.flops:,} {o.unit}" if o.as_written_flops else "", True),
                (f"{o.as_written_flops:,}" if o.as_written_flops else "", True),
                (o.why, False),
            ),
            "dead" if o.status == "dead" else "",
        )
    yield "</table>"


# ---- Drawings --------------------------------------------------------------------------------


class _Plot:
    """Logarithmic axes in a rectangle."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.left, self.top, self.width, self.height = 80, 16, 620, 300
        self._x, self._y = tuple(map(math.log10, x)), tuple(map(math.log10, y))
        self.limits = x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - self._x[0]) / (self._x[1] - self._x[0])
        up = (math.log10(y) - self._y[0]) / (self._y[1] - self._y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def line(self, points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*p) for p in points))
        return (
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2' "
            f"stroke-dasharray='{dashes}'/>"
        )

    def mark(self, x: float, y: float, label: str, colour: str, *, below: bool = False) -> str:
        cx, cy = self.at(x, y)
        anchor = "end" if cx > self.left + 0.6 * self.width else "start"
        dx = -8 if anchor == "end" else 8
        return (
            f"<circle cx='{cx:.1f}' cy='{cy:.1f}' r='4' fill='{colour}'/>"
            f"<text x='{cx + dx:.1f}' y='{cy + (18 if below else -8):.1f}' text-anchor='{anchor}'>"
            f"{escape(label)}</text>"
        )

    def frame(self, x_label: str, y_label: str) -> Iterator[str]:
        yield (
            f"<rect x='{self.left}' y='{self.top}' width='{self.width}' height='{self.height}' "
            "fill='none' stroke='#8b949e'/>"
        )
        (x0, x1), (y0, y1) = self.limits
        for power in range(math.ceil(math.log10(x0)), math.floor(math.log10(x1)) + 1):
            x, _ = self.at(10.0**power, y0)
            yield f"<text x='{x:.1f}' y='{self.top + self.height + 16}' text-anchor='middle'>1e{power}</text>"
        for power in range(math.ceil(math.log10(y0)), math.floor(math.log10(y1)) + 1):
            _, y = self.at(x0, 10.0**power)
            yield f"<text x='{self.left - 6}' y='{y + 4:.1f}' text-anchor='end'>1e{power}</text>"
        middle = self.left + self.width / 2
        yield f"<text x='{middle}' y='{self.top + self.height + 36}' text-anchor='middle'>{escape(x_label)}</text>"
        yield f"<text x='{self.left}' y='{self.top - 4}'>{escape(y_label)}</text>"

    def svg(self, parts: Iterator[str] | Sequence[str], name: str) -> str:
        return (
            f"<svg viewBox='0 0 {self.left + self.width + 20} {self.top + self.height + 48}' "
            f"width='720' role='img' aria-label='{escape(name)}'>" + "".join(parts) + "</svg>"
        )


def roofline_svg(e: Explanation) -> str:
    """FLOP/s against FLOPs a byte: the roofs, the bound, and the published baseline."""
    b = e.bound
    if not b.flops:
        return (
            f"<p>No contraction is needed, so only memory counts: {b.total_bytes:,} bytes at "
            f"{e.bandwidth_bytes_per_s / 1e12:.4g} TB/s.</p>"
        )
    peak, bandwidth = e.peak_flops, e.bandwidth_bytes_per_s
    ridge = peak / bandwidth
    needed = b.flops / max(b.total_bytes, 1)
    written = max(b.as_written_flops, 1) / max(b.unfused_bytes, 1)
    spread = [ridge, needed, written]
    x = min(spread) / 10, max(spread) * 10
    speeds = [peak, b.flops / (1e-3 * b.t_sol_ms)]
    if e.baseline_ms:
        speeds.append(b.flops / (1e-3 * e.baseline_ms))
    y = min(*speeds, x[0] * bandwidth) / 2, peak * 4
    plot = _Plot(x, y)
    roof = [(x[0], x[0] * bandwidth), (ridge, peak), (x[1], peak)]
    parts = [*plot.frame("FLOP a byte", "FLOP/s"), plot.line(roof, "#0969da")]
    parts.append(plot.mark(needed, speeds[1], f"bound {b.t_sol_ms:.4g} ms", "#1a7f37"))
    unfused = min(written * bandwidth, peak)
    if y[0] < unfused < y[1]:
        parts.append(plot.mark(written, unfused, "one kernel an operation", "#9a6700", below=True))
    if e.baseline_ms:
        label = f"published baseline {e.baseline_ms:.4g} ms"
        parts.append(plot.mark(needed, speeds[2], label, "#cf222e", below=True))
    return plot.svg(parts, "roofline")


def capacity_svg(e: Explanation) -> str:
    """Bytes moved against bytes on the chip."""
    points = e.curve.points
    least = [(float(p.capacity_bytes), p.bound_bytes) for p in points]
    found = [(float(p.capacity_bytes), p.contraction_bytes) for p in points if p.contraction_bytes]
    values = [v for _, v in (*least, *found) if v]
    plot = _Plot(
        (least[0][0], max(least[-1][0], 2.0 * e.on_chip_bytes)), (min(values) / 3, max(values) * 3)
    )
    parts = [
        *plot.frame("bytes on the chip", "bytes moved"),
        plot.line(least, "#1a7f37"),
        plot.line(found, "#9a6700", "6 4") if len(found) > 1 else "",
        plot.mark(
            max(e.on_chip_bytes, least[0][0]), min(v for _, v in least), e.bound.device, "#0969da"
        ),
    ]
    legend = "<p>Solid: no kernel moves less."
    if found:
        legend += f" Dashed: best tiling found for {escape(e.curve.contraction)} alone."
    return plot.svg(parts, "capacity curve") + legend + "</p>"


def graph_svg(nodes: Sequence[GraphNode]) -> str:
    """The run as layers from top to bottom; dead operations are dashed."""
    layer: list[int] = []
    for node in nodes:
        # A node only depends on earlier ones; chains may point at themselves.
        layer.append(1 + max((layer[a] for a in node.after if a < len(layer)), default=-1))
    width, height, gap = 190, 46, 24
    columns: dict[int, int] = {}
    place: list[tuple[float, float]] = []
    for depth in layer:
        column = columns.get(depth, 0)
        columns[depth] = column + 1
        place.append((10.0 + column * (width + 16), 10.0 + depth * (height + gap)))
    across = max((x for x, _ in place), default=0.0) + width + 10
    down = max((y for _, y in place), default=0.0) + height + 10
    parts = []
    for i, node in enumerate(nodes):
        for a in node.after:
            if a == i:
                continue
            (x0, y0), (x1, y1) = place[a], place[i]
            parts.append(
                f"<path d='M{x0 + width / 2:.0f} {y0 + height:.0f} C {x0 + width / 2:.0f} "
                f"{y0 + height + 18:.0f} {x1 + width / 2:.0f} {y1 - 18:.0f} {x1 + width / 2:.0f} "
                f"{y1:.0f}' fill='none' stroke='#8b949e'/>"
            )
    for node, (x, y) in zip(nodes, place, strict=True):
        head, _, rest = node.label.partition("\n")
        dashes = "4 3" if node.kind == "dead" else ""
        parts.append(
            f"<g><title>{escape(node.label)}</title><rect x='{x:.0f}' y='{y:.0f}' width='{width}' "
            f"height='{height}' rx='6' fill='{_COLOURS[node.kind]}' stroke='#57606a' "
            f"stroke-dasharray='{dashes}'/><text x='{x + 8:.0f}' y='{y + 19:.0f}'>"
            f"{escape(_short(head))}</text><text x='{x + 8:.0f}' y='{y + 36:.0f}'>"
            f"{escape(_short(rest))}</text></g>"
        )
    return (
        f"<svg viewBox='0 0 {across:.0f} {down:.0f}' width='{across:.0f}' role='img' "
        "aria-label='graph'>" + "".join(parts) + "</svg>"
    )


def _short(text: str, limit: int = 28) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
