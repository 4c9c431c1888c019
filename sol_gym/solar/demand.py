"""Demand: what of a run anybody needs, backwards from what is returned or written.

Operations are visited last to first. For every base the demanded part is kept; when its maker comes
up, that part is turned into demands on the maker's arguments, and what is demanded of the inputs in
the end is what any kernel has to read. Operations that nobody demands are dead and cost nothing;
elements known to be constant are not demanded at all. An overwrite ends the demand for what was
there before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .contents import Contents
from .context import Context
from .dependence import needs
from .facts import Facts
from .indexing import written_region
from .precision import work_class
from .region import Region
from .rulebook import LearnedRule, multiply_adds, rulebook
from .rulebook import needs as learned_needs
from .trace import Base, Control, Node, Trace, Value
from .work import Demand, Work, contract, is_contraction

_SIXTEEN_BITS_OR_LESS = 2
_LINEAR_MASKING = frozenset(("mul", "masked_fill", "where", "tril", "triu"))


@dataclass(frozen=True)
class Operation:
    """What became of one operation of the run."""

    node: Node
    demand: Demand | None
    """How much of its result is wanted; None if it is dead."""
    work: Work | None
    """If it is a contraction that somebody demands."""
    rewrite: str = ""
    """Why its work is less than what is demanded of it, where rewriting saves some."""

    @property
    def results(self) -> int:
        """Demanded elements of its result."""
        return self.demand.region.count() if self.demand else 0


@dataclass
class Outcome:
    """What a run demands."""

    read: dict[str, Region]
    """Input name -> the part of it that must be read."""
    written: dict[str, Region]
    """Input name -> the part of it that the reference changes in place."""
    operations: list[Operation]
    """All operations, in program order."""
    notes: list[str] = field(default_factory=list)
    """Why the demand may be less than the truth, where it may be."""
    rewrites: list[str] = field(default_factory=list)
    """What rewriting products saves (see `minimum`)."""

    @property
    def work(self) -> list[Work]:
        """Work of the contractions that somebody demands."""
        return [o.work for o in self.operations if o.work is not None]


def find_demand(trace: Trace, facts: Facts, contents: Contents) -> Outcome:
    """Run the demand pass.

    Args:
        trace: the recorded run.
        facts: about the same run.
        contents: where real values of indices come from.
    """
    return _Pass(trace, facts, contents).run()


class _Pass:
    def __init__(self, trace: Trace, facts: Facts, contents: Contents) -> None:
        self._trace = trace
        self._facts = facts
        self._contents = contents
        self._context = Context(facts, contents)
        self._wanted: dict[int, Demand] = {}
        self._unplaced: dict[int, dict[int, tuple[Value, Demand]]] = {}
        self._operations: list[Operation] = []
        self._notes: dict[str, None] = {}

    def run(self) -> Outcome:
        written = self._written_inputs()
        inputs = {n: v.base for n, v in self._trace.inputs.items()}
        there = {id(base) for base in inputs.values()}
        for value in self._trace.outputs:
            # What is returned of an input's own memory is there, but for what was written to it.
            if id(value.base) not in there:
                self._want(value, _firm(Region.full(value.shape), _is_wide(value)))
        for name, region in written.items():
            base = inputs[name]
            self._want(Value(base, base.shape, base.dtype), _firm(region, True))
        for step in reversed(self._trace.steps):
            if isinstance(step, Control):
                value = step.value
                self._want(value, _firm(Region.full(value.shape), True))
            else:
                self._operations.append(self._visit(step))
        self._operations.reverse()
        read = {}
        for name, base in inputs.items():
            demand = self._on_base(base)
            read[name] = demand.region if demand else Region.empty(base.shape)
        for name, region in read.items():
            if not region.exact:
                self._note(f"input {name!r}: some of what is read could not be followed")
        if self._contents.stand_ins:
            self._note("which elements a top-k picks was not computed; the fewest are assumed")
        return Outcome(read, written, self._operations, list(self._notes))

    def _written_inputs(self) -> dict[str, Region]:
        """What the reference changes of its inputs."""
        names = {id(v.base): n for n, v in self._trace.inputs.items()}
        written: dict[str, Region] = {}
        for step in self._trace.steps:
            if not isinstance(step, Node):
                continue
            for value in step.written:
                if name := names.get(id(value.base)):
                    part = self._changed(step, value)
                    old = written.get(name, Region.empty(value.base.shape))
                    written[name] = old.union(value.to_base(part))
        return written

    def _changed(self, node: Node, value: Value) -> Region:
        if node.pointwise:
            return Region.full(value.shape)
        region = written_region(self._context, node, value)
        return Region.empty(value.shape, exact=False) if region is None else region

    # ---- One operation -----------------------------------------------------------------------

    def _visit(self, node: Node) -> Operation:
        demands: dict[int, Demand] = {}
        for i, out in enumerate(node.outs):
            if out is not None and (demand := self._take(node, out)) is not None:
                demands[i] = demand
        for i, value in enumerate(node.written):
            if not any(value is out for out in node.outs):
                demand = self._take(node, value)
                if demand is not None:
                    demands[i] = demand
        if not demands:
            return Operation(node, None, None)
        total = next(iter(demands.values()))
        if len(demands) > 1:
            total = total._replace(
                share=min(d.share for d in demands.values()),
                full_precision=any(d.full_precision for d in demands.values()),
            )
        if is_contraction(node):
            found, work = contract(self._facts, node, total)
            if work is not None and not work.exact:
                self._note(f"{node}: products with elements that may be masked are not counted")
            for value, region in found:
                self._want(value, _firm(region, total.full_precision))
            return Operation(node, total, work)
        wanted = {i: d.region for i, d in demands.items()}
        found_needs = needs(self._context, node, wanted)
        if found_needs is None and (rule := rulebook().get(node)) is not None:
            return self._by_learned_rule(node, rule, total, wanted)
        if found_needs is None:
            self._note(f"{node}: no rule for this operation; what it needs is not counted")
            return Operation(node, total, None)
        firm = {i: d.firm for i, d in demands.items()}
        if all(firm[i] is wanted[i] for i in wanted):
            for value, region in found_needs:
                self._pass_on(node, value, region, region, total)
            return Operation(node, total, None)
        firm_needs = needs(self._context, node, firm)
        assert firm_needs is not None
        for (value, region), (_, sure) in zip(found_needs, firm_needs, strict=True):
            self._pass_on(node, value, region, sure, total)
        return Operation(node, total, None)

    def _by_learned_rule(
        self, node: Node, rule: LearnedRule, total: Demand, wanted: dict[int, Region]
    ) -> Operation:
        for value, region in learned_needs(rule, node, wanted):
            self._want(value, _firm(region, total.full_precision))
        macs = multiply_adds(rule, node, total.region)
        work = None
        if macs > total.region.count():
            left, right = (self._facts.at(node, v).format for v in node.inputs[:2])
            unit = work_class(left, right, full_precision=total.full_precision)
            work = Work(str(node), 2 * macs, unit, True)
        return Operation(node, total, work)

    def _pass_on(
        self, node: Node, value: Value, region: Region, firm: Region, total: Demand
    ) -> None:
        """Demand on an argument, weakened where a mask lies between it and the result."""
        share = total.share
        if node.plain_name in _LINEAR_MASKING and not node.written:
            own = self._facts.at(node, value)
            out = node.outs[0]
            assert out is not None
            result = self._facts.of(out, 0)
            if own.linear and result.scan and not own.scan:
                firm = Region.empty(firm.shape)
            if result.density == 0.0 < own.density:
                firm = Region.empty(firm.shape, exact=False)
            elif own.density > 0.0:
                share *= min(1.0, result.density / own.density)
        self._want(value, Demand(region, firm, share, total.full_precision))

    def _take(self, node: Node, out: Value) -> Demand | None:
        """The demand on a result, which ends here unless the operation only changed it."""
        base = out.base
        made_here = base.makers[0] is node
        if not made_here and not any(out is w for w in node.written):
            return None
        demand = self._on_base(base)
        if demand is None:
            return None
        version = 0 if made_here else node.version_of(out) + 1
        live = self._facts.of(out, version).live
        region = out.from_base(demand.region).intersect(live)
        firm = (
            region if demand.firm is demand.region else out.from_base(demand.firm).intersect(live)
        )
        if made_here:
            del self._wanted[id(base)]
        else:
            self._overwrite(node, out, demand, live)
        if not region and region.exact:
            return None
        narrow = out.dtype.is_floating_point and out.dtype.itemsize <= _SIXTEEN_BITS_OR_LESS
        return Demand(region, firm, demand.share, demand.full_precision and not narrow)

    def _overwrite(self, node: Node, out: Value, demand: Demand, live: Region) -> None:
        """End the demand for what an in-place operation replaces, or makes a known constant."""
        region = None if out.opaque else written_region(self._context, node, out)
        if region is not None and live.exact:
            region = region.union(Region.full(out.shape).subtract(live))
        if region is None or not region.exact:
            # Anything may have been replaced.
            nothing = Region.empty(out.base.shape, exact=False)
            self._wanted[id(out.base)] = demand._replace(region=nothing, firm=nothing)
        elif region:
            gone = out.to_base(region)
            self._wanted[id(out.base)] = demand._replace(
                region=demand.region.subtract(gone), firm=demand.firm.subtract(gone)
            )

    def _want(self, value: Value, demand: Demand) -> None:
        """Add to the demand on a tensor.

        What is wanted of a view is collected there and placed in its base when somebody asks:
        rows that a loop picks from a flattened view one by one are scattered pieces of the base.
        """
        views = self._unplaced.setdefault(id(value.base), {})
        old = views.get(id(value))
        views[id(value)] = (value, demand if old is None else _both(old[1], demand))

    def _on_base(self, base: Base) -> Demand | None:
        """All that is wanted of a base so far."""
        demand = self._wanted.get(id(base))
        for value, part in self._unplaced.pop(id(base), {}).values():
            region = value.to_base(part.region)
            firm = region if part.firm is part.region else value.to_base(part.firm)
            placed = part._replace(region=region, firm=firm)
            demand = placed if demand is None else _both(demand, placed)
        if demand is not None:
            self._wanted[id(base)] = demand
        return demand

    def _note(self, text: str) -> None:
        self._notes[text] = None


def _firm(region: Region, full_precision: bool) -> Demand:
    return Demand(region, region, 1.0, full_precision)


def _both(a: Demand, b: Demand) -> Demand:
    """Two demands on the same tensor as one."""
    region = a.region.union(b.region)
    same = a.firm is a.region and b.firm is b.region
    return Demand(
        region=region,
        firm=region if same else a.firm.union(b.firm),
        share=min(a.share, b.share),
        full_precision=a.full_precision or b.full_precision,
    )


def _is_wide(value: Value) -> bool:
    return value.dtype.itemsize > _SIXTEEN_BITS_OR_LESS or not value.dtype.is_floating_point
