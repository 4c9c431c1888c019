"""Wrong versions of a reference, and right ones that compute it another way.

Used by `verifier_strength.py` alone; nothing at run time needs it. A *mutant* is a reference with
one fault: in its source (an operand dropped, a constant off, a mask or a cache write left out), in
what it reads (an input zeroed, replaced by ones, read one place off), in what it writes (rows
skipped, stale, constant) or in its precision. A *reformulation* is what an honest author may do:
sums in another order, operations fused without rounding in between, products in the precision that
the problem's policy admits.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sol_gym.problem import Problem, TensorArg, Workload
from sol_gym.sandbox.precision import _CONVOLUTIONS, _PRODUCTS, round_mantissa, rounded_outputs
from sol_gym.sandbox.reference import Reference

Outputs = dict[str, TensorArg]
Run = Callable[[list[Any], Outputs], list[Tensor]]


@dataclass(frozen=True)
class Version:
    """One wrong or right way to compute a problem."""

    kind: str
    """Family, e.g. `operand`, `input`, `rows`, `precision`, `statistic` (sums in bfloat16)."""
    name: str
    """What was changed, and where."""
    run: Run
    """f(inputs in call order, declared outputs) -> outputs; may raise, a fault like others."""
    source: str | None = None
    """The changed reference, where the change is in the source."""
    change: Callable[[list[Any]], list[Any]] | None = None
    """The changed inputs, where the change is there."""


# ---- Faults in the source --------------------------------------------------------------------

_ELEMENTWISE = {
    "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "exp2", "log", "softplus", "rsqrt", "sqrt",
    "square", "abs", "neg", "clamp", "clamp_min", "clamp_max", "softmax", "masked_fill", "cumsum",
    "cos", "sin", "reciprocal", "pow", "tril", "triu", "roll", "flip", "layer_norm", "group_norm",
    "index_copy", "index_add", "index_add_", "scatter", "scatter_add", "scatter_add_", "add_",
    "mul_", "index_copy_", "masked_fill_",
}  # fmt: skip
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "logsumexp"}


class _Sites(ast.NodeVisitor):
    """Every place that a mutation applies to, as (kind, description, function that changes it)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, ast.AST, Callable[[ast.AST], ast.AST | None]]] = []

    def add(
        self, kind: str, what: str, node: ast.AST, make: Callable[[Any], ast.AST | None]
    ) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append((kind, f"line {line}: {what}", node, make))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = _short(node)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            self.add("operand", f"right operand of `{text}` dropped", node, lambda n: n.left)
            if isinstance(node.op, ast.Add | ast.Mult):
                self.add("operand", f"left operand of `{text}` dropped", node, lambda n: n.right)
        if isinstance(node.op, ast.Add):
            self.add("sign", f"`{text}` with the sign turned", node, lambda n: ast.BinOp(n.left, ast.Sub(), n.right))  # fmt: skip
        if isinstance(node.op, ast.Sub):
            self.add("sign", f"`{text}` with the sign turned", node, lambda n: ast.BinOp(n.left, ast.Add(), n.right))  # fmt: skip
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.add("sign", f"`{_short(node)}` without its sign", node, lambda n: n.operand)
        if isinstance(node.op, ast.Invert):
            self.add("mask", f"`{_short(node)}` not inverted", node, lambda n: n.operand)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        turned: dict[type, ast.cmpop] = {
            ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(),
        }  # fmt: skip
        if (other := turned.get(type(node.ops[0]))) is not None:
            self.add("off by one", f"`{_short(node)}` at its boundary", node, lambda n: ast.Compare(n.left, [other], n.comparators))  # fmt: skip
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, float) and node.value:
            self.add("constant", f"{node.value} a tenth larger", node, lambda n: ast.Constant(n.value * 1.1))  # fmt: skip
        elif isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 0:
            self.add("off by one", f"{node.value} one more", node, lambda n: ast.Constant(n.value + 1))  # fmt: skip

    def visit_Call(self, node: ast.Call) -> None:
        name, method = _callee(node)
        inner = node.func.value if method and isinstance(node.func, ast.Attribute) else None  # type: ignore[attr-defined]
        first = inner if inner is not None else (node.args[0] if node.args else None)
        if first is not None and name in _ELEMENTWISE:
            self.add("step", f"`{_short(node)}` left out", node, lambda n: first)
        if first is not None and name in _REDUCTIONS:
            self.add("reduction", f"`{_short(node)}` without its last element", node, lambda n: _reduce_less(n))  # fmt: skip
        if name == "where" and len(node.args) == 3:
            self.add("mask", f"`{_short(node)}` always its second", node, lambda n: n.args[1])
            self.add("mask", f"`{_short(node)}` always its third", node, lambda n: n.args[2])
        if name == "repeat_interleave" and inner is not None:
            self.add("heads", f"`{_short(node)}` tiled", node, _tiled)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Subscript):
            self.add("write", f"`{_short(node)}` left out", node, lambda n: ast.Pass())
        if (
            isinstance(target, ast.Tuple)
            and len(target.elts) == 2
            and isinstance(node.value, ast.Call)
        ):
            self.add("swap", f"`{_short(node)}` with its results exchanged", node, _exchanged)
        self.generic_visit(node)


def _reduce_less(node: ast.Call) -> ast.AST:
    cut = copy.deepcopy(node)
    shorter = ast.Slice(upper=ast.Constant(-1))
    place = ast.Tuple([ast.Constant(...), shorter], ast.Load())
    if isinstance(cut.func, ast.Attribute) and not _is_module(cut.func.value):
        cut.func.value = ast.Subscript(cut.func.value, place, ast.Load())
    else:
        cut.args[0] = ast.Subscript(cut.args[0], place, ast.Load())
    return cut


def _tiled(node: ast.Call) -> ast.AST:
    tiled = copy.deepcopy(node)
    assert isinstance(tiled.func, ast.Attribute)
    return ast.Call(ast.Name("_tile", ast.Load()), [tiled.func.value, *tiled.args], tiled.keywords)


def _exchanged(node: ast.Assign) -> ast.AST:
    other = copy.deepcopy(node)
    other.targets[0].elts.reverse()  # type: ignore[attr-defined]
    return other


_TILE = """
def _tile(x, repeats, dim=0):
    sizes = [1] * x.dim()
    sizes[dim] = repeats
    return x.repeat(*sizes)
"""


def _callee(node: ast.Call) -> tuple[str, bool]:
    """Name of what is called, and whether it is a method of a value."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, not _is_module(node.func.value)
    return (node.func.id if isinstance(node.func, ast.Name) else ""), False


def _is_module(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "math")


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, make: Callable[[ast.AST], ast.AST | None]):
        self.target, self.make = target, make

    def visit(self, node: ast.AST) -> Any:
        return self.make(node) if node is self.target else self.generic_visit(node)


def source_mutants(problem: Problem) -> Iterator[tuple[str, str, str]]:
    """(kind, description, changed source) of every fault in what `run` reaches."""
    tree = ast.parse(problem.reference)
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    reached, pending = set(), ["run"]
    while pending:
        name = pending.pop()
        if name in functions and name not in reached:
            reached.add(name)
            pending += [n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)]
    names = {n.id for f in reached for n in ast.walk(functions[f]) if isinstance(n, ast.Name)}
    sites = _Sites()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in reached:
            for statement in node.body:
                sites.visit(statement)
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id in names for t in node.targets
        ):
            sites.visit(node.value)
    for kind, what, target, make in sites.found:
        marked = copy.deepcopy((tree, target))
        changed = ast.fix_missing_locations(_Replace(marked[1], make).visit(marked[0]))
        yield kind, what, ast.unparse(changed) + (_TILE if kind == "heads" else "")


# ---- Mutants of one workload -----------------------------------------------------------------


def mutants(problem: Problem, workload: Workload, reference: Reference) -> Iterator[Version]:
    """All faults of one problem; those in the source first."""
    outputs = problem.outputs(workload)
    for kind, what, source in source_mutants(problem):
        definition = problem.definition.model_copy(update={"reference": source})
        try:
            broken = Reference(problem.model_copy(update={"definition": definition}))
        except Exception:
            continue
        yield Version(kind, what, broken, source=source)
    yield from _input_mutants(problem, workload, reference)
    yield from _output_mutants(outputs, reference)
    yield from _precision_mutants(problem, workload, reference, outputs)


def _input_mutants(problem: Problem, workload: Workload, run: Run) -> Iterator[Version]:
    tensors = problem.tensors(workload)
    for position, (name, spec) in enumerate(problem.definition.inputs.items()):
        changes: dict[str, Callable[[Any], Any]] = {}
        if name in tensors:
            if "float4" in spec.dtype or not tensors[name].numel:
                continue
            if "float" in spec.dtype:
                changes = {"taken as zeros": torch.zeros_like, "taken as ones": _ones}
            elif spec.dtype == "bool":
                changes = {"taken as true": torch.ones_like, "taken as false": torch.zeros_like}
            if tensors[name].shape:
                changes["read one place off"] = lambda t: t.roll(1, -1)
            if len(tensors[name].shape) > 1:
                changes["read one row off"] = lambda t: t.roll(1, 0)
                changes["first row for all"] = lambda t: t[:1].expand_as(t).contiguous()
        elif spec.dtype != "bool" and "float" in spec.dtype:
            changes = {"taken as zero": lambda v: 0.0, "taken as one": lambda v: 1.0}
        elif spec.dtype == "bool":
            changes = {"inverted": lambda v: not v}
        for what, change in changes.items():
            at = _at(position, change)
            yield Version("input", f"{name} {what}", lambda a, o, at=at: run(at(a), o), change=at)


def _ones(t: Tensor) -> Tensor:
    return torch.ones_like(t.float()).to(t.dtype)


def _at(position: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    def apply(arguments: list[Any]) -> list[Any]:
        changed = list(arguments)
        value = changed[position]
        if isinstance(value, Tensor) and value.dtype.itemsize == 1 and value.is_floating_point():
            bits = value.view(torch.uint8)
            changed[position] = (
                change(value)
                if change in (_ones, torch.zeros_like)
                else change(bits).view(value.dtype)
            )
        else:
            changed[position] = change(value)
        return changed

    return apply


def _output_mutants(outputs: Outputs, run: Run) -> Iterator[Version]:
    for position, (name, spec) in enumerate(outputs.items()):
        if not spec.numel:
            continue

        def version(what: str, change: Callable[[Tensor], None], position: int = position, name: str = name) -> Version:  # fmt: skip
            def changed(arguments: list[Any], declared: Outputs) -> list[Tensor]:
                results = [r.clone() for r in run(arguments, declared)]
                change(_flat_rows(results[position]))
                return results

            return Version("rows", f"{name}: {what}", changed)

        yield version("the last eighth skipped", lambda r: r[-max(1, r.shape[0] // 8) :].zero_())
        yield version("one row in a hundred skipped", lambda r: r[:: max(1, min(100, r.shape[0] // 2))].zero_())  # fmt: skip
        yield version("constant zero", lambda r: r.zero_())
        if math.prod(spec.shape[:-1]) > 3 or (len(spec.shape) == 1 and spec.numel > 3):
            yield version("one stale row", lambda r: r[1].copy_(r[2]))
            yield version("the last row a copy of the first", lambda r: r[-1].copy_(r[0]))
        if "float" in spec.dtype:
            yield version("one row in a hundred off by a tenth", lambda r: r[:: max(1, min(100, r.shape[0] // 2))].mul_(1.1))  # fmt: skip


def _flat_rows(t: Tensor) -> Tensor:
    return t.view(-1, t.shape[-1]) if t.dim() > 1 else t.view(-1, 1)


def _precision_mutants(
    problem: Problem, workload: Workload, reference: Reference, outputs: Outputs
) -> Iterator[Version]:
    dtypes = {s.dtype for s in problem.definition.inputs.values() if s.shape is not None}
    outs = {s.dtype for s in outputs.values()}
    policy = problem.pack.precision_policy if problem.pack else None

    def under(what: str, mode: Callable[[], TorchFunctionMode], kind: str = "precision") -> Version:
        def run(arguments: list[Any], declared: Outputs) -> list[Tensor]:
            with mode():
                results = reference.returned(arguments, declared)
            return _as_declared(results, declared)

        return Version(kind, what, run)

    quantised = any("float8" in d or "float4" in d for d in dtypes) or problem.id.startswith(
        "Quant"
    )
    if outs & {"float32"} and not dtypes & {"bfloat16", "float16"} and not quantised:
        yield under("every step rounded to bfloat16", lambda: _RoundSteps(torch.bfloat16))
        yield under("every step rounded to float16", lambda: _RoundSteps(torch.float16))
        if policy is not None and policy.contraction == "float32":
            yield under("products in TF32", lambda: _RoundProducts(lambda t: round_mantissa(t, 10), _PRODUCTS))  # fmt: skip
        yield under("products in bfloat16", lambda: _RoundProducts(lambda t: round_mantissa(t, 7), _PRODUCTS | _CONVOLUTIONS))  # fmt: skip
    yield under("results of sums and means rounded to bfloat16", _RoundSums, "statistic")
    yield under("terms and results of sums and means rounded to bfloat16", lambda: _RoundSums(terms=True), "statistic")  # fmt: skip
    if not quantised:
        yield under("products in float8", lambda: _RoundProducts(_through_float8, _PRODUCTS | _CONVOLUTIONS))  # fmt: skip
        for position, (name, arg) in enumerate(problem.tensors(workload).items()):
            if arg.dtype not in ("bfloat16", "float16", "float32"):
                continue
            where = list(problem.definition.inputs).index(name)
            for what, change in (("float8", _through_float8), ("float16", lambda t: t.half().to(t.dtype))):  # fmt: skip
                if what == "float16" and (arg.dtype == "float16" or position > 2):
                    continue
                at = _at(where, change)
                yield Version("precision", f"{name} through {what}", lambda a, o, at=at: reference(at(a), o), change=at)  # fmt: skip


def _as_declared(results: list[Any], declared: Outputs) -> list[Tensor]:
    return [r.to(getattr(torch, s.dtype)) for r, s in zip(results, declared.values(), strict=True)]


def _through_float8(t: Tensor) -> Tensor:
    """Scaled by the largest of all, so that nothing saturates."""
    scale = t.abs().amax().float().clamp_min(1e-30) / 448
    return ((t.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(t.dtype)


class _RoundSteps(TorchFunctionMode):
    """Every floating result of every step rounded to a narrower dtype and back."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32:
            return result.to(self.dtype).float()
        return result


_SUMS = {torch.sum, torch.mean, torch.var, torch.Tensor.sum, torch.Tensor.mean, torch.Tensor.var}
_SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax}


class _RoundSums(TorchFunctionMode):
    """Sums, means and variances in bfloat16, softmax and layer norm in such steps."""

    def __init__(self, *, terms: bool = False):
        super().__init__()
        self.terms = terms

    def _sum(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = x.bfloat16().to(x.dtype) if self.terms else x
        result = func(given, *args, **kwargs)
        return result.bfloat16().to(result.dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if not (isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize > 1):
            return func(*args, **kwargs)
        if func in _SUMS:
            return self._sum(func, *args, **kwargs)
        if func in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            dtype = kwargs.get("dtype") or x.dtype
            wide = x.float()
            top = wide.amax(dim, keepdim=True)
            raised = (wide - torch.where(top.isfinite(), top, 0)).exp()
            return (raised / self._sum(torch.sum, raised, dim, keepdim=True)).to(dtype)
        if func is F.layer_norm:
            shape, weight, bias, eps = _bound_layer_norm(*args, **kwargs)
            dims, wide = list(range(-len(shape), 0)), x.float()
            centred = wide - self._sum(torch.mean, wide, dims, keepdim=True)
            spread = self._sum(torch.mean, centred.square(), dims, keepdim=True)
            result = centred * torch.rsqrt(spread + eps)
            result = result if weight is None else result * weight.float()
            return (result if bias is None else result + bias.float()).to(x.dtype)
        return func(*args, **kwargs)


def _bound_layer_norm(
    _: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[Any, Any, Any, float]:
    return normalized_shape, weight, bias, eps


class _RoundProducts(TorchFunctionMode):
    """Operands of contractions rounded."""

    def __init__(self, change: Callable[[Tensor], Tensor], functions: set[Any]):
        super().__init__()
        self.change, self.functions = change, functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.functions:
            args = tuple(self._one(a) for a in args)
        return func(*args, **(kwargs or {}))

    def _one(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._one(v) for v in value)
        if isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point():
            wide = self.change(value.float())
            return wide.to(value.dtype)
        return value


# ---- Reformulations --------------------------------------------------------------------------


def reformulations(problem: Problem, reference: Reference) -> Iterator[Version]:
    """What an honest author may do instead."""

    def under(name: str, *modes: Callable[[], TorchFunctionMode], widen: bool = False) -> Version:
        def run(arguments: list[Any], declared: Outputs) -> list[Tensor]:
            given = [_to_float32(a) for a in arguments] if widen else arguments
            entered = [mode() for mode in modes]
            for mode in entered:
                mode.__enter__()
            try:
                results = reference.returned(given, declared)
            finally:
                for mode in reversed(entered):
                    mode.__exit__(None, None, None)
            return _as_declared(results, declared)

        return Version("reformulation", name, run)

    yield Version("reformulation", "the reference itself", reference)
    yield under("sums of products in chunks of 16", lambda: _Reorder(16))
    yield under("sums in reverse order, products split in two", lambda: _Reorder(0, reverse=True))
    yield under("exponentials by exp2, reciprocal roots by division", _FastForms)
    yield under("fused: float32 throughout, rounded once", _Fuse, widen=True)
    yield under("fused, other order, other forms", _FastForms, lambda: _Reorder(32), _Fuse, widen=True)  # fmt: skip
    yield under("sums one after the other", lambda: _Reorder(0, sequential=True))
    dtypes = {s.dtype for s in problem.definition.inputs.values() if s.shape is not None}
    halves = bool(dtypes & {"bfloat16", "float16"})
    exponent = -20 if halves else -22
    yield under(f"exponentials and roots off by 2^{exponent}", lambda: _Approximate(2.0**exponent))
    policy = problem.pack.precision_policy if problem.pack else None
    # The softmax of a router is no operand of a product.
    if halves and policy is not None and policy.contraction in ("bfloat16", "float16") and not problem.pack.selects:  # fmt: skip
        narrow = getattr(torch, policy.contraction)
        yield under("softmax of rounded exponentials over their exact sum", lambda: _Flash(narrow))
        yield under("fused, softmax of rounded exponentials", lambda: _Flash(narrow), _Fuse, widen=True)  # fmt: skip
    if policy is not None:

        def lowered(arguments: list[Any], declared: Outputs) -> list[Tensor]:
            lower = rounded_outputs(reference, arguments, declared, policy)
            return reference(arguments, declared) if lower is None else lower

        yield Version("reformulation", "products in the policy's precision", lowered)
        bits = {"tf32": 10, "bfloat16": 7, "float16": 10, "float32": None}[policy.contraction]
        if bits is not None:
            yield under(
                "fused, products in the policy's precision, other order",
                _FastForms,
                lambda: _Reorder(32),
                lambda: _RoundProducts(lambda t: round_mantissa(t, bits), _PRODUCTS),
                _Fuse,
                widen=True,
            )


def _to_float32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    if isinstance(value, torch.dtype):
        return torch.float32 if value in (torch.bfloat16, torch.float16) else value
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_to_float32(v) for v in value)
    return value


class _Fuse(TorchFunctionMode):
    """16-bit floats kept in float32 between steps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].float()
        if func is torch.Tensor.view and any(isinstance(a, torch.dtype) for a in args[1:]):
            return func(*args, **(kwargs or {}))
        args = tuple(_to_float32(a) for a in args)
        return func(*args, **{k: _to_float32(v) for k, v in (kwargs or {}).items()})


class _FastForms(TorchFunctionMode):
    """Functions by other identities, as kernels write them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and not kwargs:  # fmt: skip
            wide, dtype = x.float(), x.dtype
            if func in (torch.exp, torch.Tensor.exp):
                return torch.exp2(wide * (1 / math.log(2))).to(dtype)
            if func in (torch.sigmoid, torch.Tensor.sigmoid):
                return (1 / (1 + torch.exp2(wide * (-1 / math.log(2))))).to(dtype)
            if func is F.silu:
                return (wide / (1 + torch.exp2(wide * (-1 / math.log(2))))).to(dtype)
            if func in (torch.rsqrt, torch.Tensor.rsqrt):
                return (1 / wide.sqrt()).to(dtype)
            if func in (torch.tanh, torch.Tensor.tanh):
                return (2 / (1 + torch.exp2(wide * (-2 / math.log(2)))) - 1).to(dtype)
        return func(*args, **kwargs)


class _Approximate(TorchFunctionMode):
    """Exponentials and roots off by a relative error, as fast instructions are at their worst."""

    def __init__(self, error: float):
        super().__init__()
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.sigmoid, torch.Tensor.sigmoid, F.silu) and args[0].dtype is torch.float32:
            x = args[0]
            below = 1 + torch.exp(-x) * (1 + self.error)
            return x / below if func is F.silu else 1 / below
        result = func(*args, **kwargs)
        if func in _ROOTS and result.dtype is torch.float32:
            return result * (1 + self.error)
        return result


_ROOTS = {
    torch.exp, torch.Tensor.exp, torch.rsqrt, torch.Tensor.rsqrt, torch.sqrt, torch.Tensor.sqrt,
}  # fmt: skip


class _Flash(TorchFunctionMode):
    """Exponentials rounded before they are multiplied by values, divided by their sum after it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SOFTMAX or not args[0].is_floating_point():
            return func(*args, **kwargs)
        x, dim = args[0].float(), kwargs.get("dim", args[1] if len(args) > 1 else -1)
        top = x.amax(dim, keepdim=True)
        raised = (x - torch.where(top.isfinite(), top, 0)).exp()
        result = raised.to(self.dtype).float() / raised.sum(dim, keepdim=True)
        return result.to(kwargs.get("dtype") or args[0].dtype)


class _Reorder(TorchFunctionMode):
    """Sums and products of matrices added up in another order, in float32."""

    def __init__(self, chunk: int, *, reverse: bool = False, sequential: bool = False):
        super().__init__()
        self.chunk, self.reverse, self.sequential = chunk, reverse, sequential

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        matmul = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.mm)
        if func in matmul and len(args) == 2 and not kwargs and self._fits(args[0], args[1]):
            return self._product(args[0], args[1])
        if func is F.linear and self._fits(args[0], args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            weight = args[1].mT if args[1].dim() > 1 else args[1]
            wide = self._product(args[0], weight, rounded=False)
            return (wide if bias is None else wide + bias.float()).to(args[0].dtype)
        if func in (torch.Tensor.sum, torch.Tensor.mean) and self._summable(args[0], kwargs, args):
            x, dim = args[0].float(), kwargs["dim"]
            if self.sequential:
                total = x.movedim(dim, -1).cumsum(-1)[..., -1]
                total = total.unsqueeze(dim) if kwargs.get("keepdim") else total
            else:
                total = x.flip(dim).sum(dim=dim, keepdim=kwargs.get("keepdim", False))
            if func is torch.Tensor.mean:
                total = total / x.shape[dim]
            return total.to(args[0].dtype)
        return func(*args, **kwargs)

    @staticmethod
    def _fits(a: Any, b: Any) -> bool:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return a.dtype in floats and a.dtype == b.dtype and a.dim() > 1 and b.dim() > 1

    @staticmethod
    def _summable(x: Tensor, kwargs: dict[str, Any], args: Any) -> bool:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        dim = kwargs.get("dim")
        return x.dtype in floats and isinstance(dim, int) and len(args) == 1 and x.shape[dim] > 0

    def _product(self, a: Tensor, b: Tensor, rounded: bool = True) -> Tensor:
        wide_a, wide_b, depth = a.float(), b.float(), a.shape[-1]
        step = self.chunk or max(1, depth // 2)
        starts = list(range(0, depth, step))
        if self.reverse:
            starts.reverse()
        total = wide_a[..., :0] @ wide_b[..., :0, :]
        for start in starts:
            part = slice(start, start + step)
            total = total + wide_a[..., part] @ wide_b[..., part, :]
        return total.to(a.dtype) if rounded else total
