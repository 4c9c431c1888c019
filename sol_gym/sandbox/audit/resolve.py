"""What expressions of a Python source mean: names through imports and aliases, literal texts, flows.

Resolving is flow-insensitive: an alias counts in the whole file. It never recurses over the tree,
so that no nesting depth can stop it.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_BUILTINS = frozenset(dir(builtins))
HOLE = "\0"
"""Stands for a part of a text that is not known."""


class Names:
    """The names of one module and what they stand for."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.nodes: dict[type, list[Any]] = _by_type(tree)
        self.aliases: dict[str, str] = {}
        self.bound: set[str] = set()
        self.functions: dict[str, ast.FunctionDef] = {}
        self._texts: dict[str, str] = {}
        self._collect()

    def _collect(self) -> None:
        for node in self.nodes[ast.Import]:
            for a in node.names:
                name = a.asname or a.name.split(".")[0]
                self.aliases[name] = a.name if a.asname else name
        for node in self.nodes[ast.ImportFrom]:
            if node.level == 0 and node.module:
                for a in node.names:
                    self.aliases[a.asname or a.name] = f"{node.module}.{a.name}"
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            self.bound |= {node.name for node in self.nodes[kind]}
        for node in self.nodes[ast.FunctionDef]:
            self.functions.setdefault(node.name, node)
        self.bound |= {node.arg for node in self.nodes[ast.arg]}
        self.bound |= {n.id for n in self.nodes[ast.Name] if isinstance(n.ctx, ast.Store)}
        assigned: list[tuple[str, ast.expr]] = []
        for node in self.nodes[ast.Assign]:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.append((target.id, node.value))
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                    assigned += [(t.id, v) for t, v in pairs if isinstance(t, ast.Name)]
        for node in self.nodes[ast.NamedExpr] + self.nodes[ast.AnnAssign]:
            if isinstance(node.target, ast.Name) and node.value is not None:
                assigned.append((node.target.id, node.value))
        self.assigned = assigned
        for _ in range(2):  # Twice, for an alias of an alias that is defined further down.
            for name, value in assigned:
                meant = self.dotted(value)
                if (
                    meant
                    and meant != name
                    and meant.split(".")[0] not in self.bound - set(self.aliases)
                ):
                    self.aliases[name] = meant
                known = self.constant(value)
                if isinstance(known, str) and HOLE not in known and len(known) < 10_000:
                    self._texts.setdefault(name, known)

    def dotted(self, node: ast.AST | None) -> str | None:
        """What an expression names, as `module.attribute`, if that can be told."""
        tail: list[str] = []
        for _ in range(64):
            if isinstance(node, ast.Attribute):
                if node.attr != "__dict__":
                    tail.append(node.attr)
                node = node.value
                continue
            if isinstance(node, ast.NamedExpr):
                node = node.value
                continue
            if isinstance(node, ast.Name):
                head = self.aliases.get(node.id)
                if head is None:
                    if node.id in self.bound or node.id not in _BUILTINS | {"__builtins__"}:
                        return None
                    head = node.id
                if head == "__builtins__":
                    head = "builtins"
                return self._joined(head, tail)
            if isinstance(node, ast.Call):
                called = node.func
                name = called.id if isinstance(called, ast.Name) else None
                target = self.dotted(called) if not isinstance(called, ast.Call) else None
                if node.args and (name == "__import__" or target == "importlib.import_module"):
                    module = self.constant(node.args[0])
                    if isinstance(module, str) and HOLE not in module:
                        head = module.split(".")[0] if name == "__import__" else module
                        return self._joined(head, tail)
                if name == "getattr" and len(node.args) >= 2:
                    attribute = self.constant(node.args[1])
                    if isinstance(attribute, str) and HOLE not in attribute:
                        tail.append(attribute)
                        node = node.args[0]
                        continue
                if name == "vars" and len(node.args) == 1:
                    node = node.args[0]
                    continue
                return None
            if isinstance(node, ast.Subscript):
                key = self.constant(node.slice)
                if not isinstance(key, str) or HOLE in key:
                    return None
                if self._is_modules(node.value):
                    return self._joined(key, tail)
                inner = node.value
                is_namespace = (isinstance(inner, ast.Attribute) and inner.attr == "__dict__") or (
                    isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
                    and inner.func.id in ("vars", "globals")
                )  # fmt: skip
                if not is_namespace:
                    return None
                if isinstance(inner, ast.Call) and not inner.args:  # globals()["name"]
                    node = ast.Name(key, ast.Load())
                    continue
                tail.append(key)
                node = inner
                continue
            return None
        return None

    def _joined(self, head: str, tail: list[str]) -> str:
        parts = [head, *reversed(tail)]
        if parts[0] == "builtins" and len(parts) > 1:
            parts = parts[1:] if len(parts) == 2 else parts
        return ".".join(parts)

    def _is_modules(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute | ast.Name) and self.dotted(node) == "sys.modules"

    def constant(self, node: ast.AST | None) -> str | bytes | None:
        """A literal text: constants, sums, f-strings, joins and formats; holes where it is unknown."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str | bytes) else None
        if isinstance(node, ast.Name):
            return self._texts.get(node.id)
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(v.value) if isinstance(v, ast.Constant) else self._texts.get(v.value.id, HOLE)
                if isinstance(v, ast.FormattedValue) and isinstance(v.value, ast.Name) else HOLE
                for v in node.values
            )  # fmt: skip
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Div):
            parts: list[ast.AST] = []
            slash = False
            at: ast.AST = node
            while isinstance(at, ast.BinOp) and isinstance(at.op, ast.Add | ast.Div):
                slash |= isinstance(at.op, ast.Div)
                parts.append(at.right)
                at = at.left
            parts.append(at)
            known = [self._leaf(p) for p in reversed(parts)]
            if not any(isinstance(k, str | bytes) for k in known):
                return None
            if any(isinstance(k, bytes) for k in known):
                return b"".join(k for k in known if isinstance(k, bytes))
            return ("/" if slash else "").join(k if isinstance(k, str) else HOLE for k in known)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            left = self._leaf(node.left)
            return left if isinstance(left, str) else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            step = node.slice.step  # "txet"[::-1]
            inner = self._leaf(node.value)
            if (
                isinstance(inner, str)
                and isinstance(step, ast.UnaryOp)
                and node.slice.lower is None
            ):
                return inner[::-1]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = self._leaf(node.func.value)
            first = node.args[0] if node.args else None
            if (
                isinstance(owner, str)
                and node.func.attr == "join"
                and isinstance(first, ast.List | ast.Tuple)
            ):
                pieces = [self._leaf(e) for e in first.elts]
                return owner.join(p if isinstance(p, str) else HOLE for p in pieces)
            if isinstance(owner, str) and node.func.attr == "format":
                return owner
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("Path", "PurePath", "str") and node.args:
                inner = self._leaf(node.args[0])
                return inner if isinstance(inner, str) else None
            if (
                node.func.id == "chr"
                and len(node.args) == 1
                and isinstance(node.args[0], ast.Constant)
            ):
                code = node.args[0].value
                return chr(code) if isinstance(code, int) and 0 <= code < 0x110000 else None
        return None

    def _leaf(self, node: ast.AST) -> str | bytes | None:
        """As `constant`, but not into nested sums (they were flattened)."""
        if isinstance(node, ast.BinOp):
            return None
        return self.constant(node)

    # -- what flows from where ----------------------------------------------------------------

    def tainted_by(self, is_source: Callable[[ast.Call], bool]) -> set[str]:
        """Names of variables and functions whose value comes from a source call (three hops)."""
        tainted: set[str] = set()
        if not any(map(is_source, self.nodes[ast.Call])):
            return tainted
        flows = list(self.assigned)
        for function in self.functions.values():
            flows += [
                (function.name, n.value)
                for n in ast.walk(function)
                if isinstance(n, ast.Return | ast.Yield) and n.value is not None
            ]
        for node in self.nodes[ast.For] + self.nodes[ast.comprehension]:
            if isinstance(node.target, ast.Name):
                flows.append((node.target.id, node.iter))
        for _ in range(3):
            for name, value in flows:
                if name not in tainted and self._touches(value, tainted, is_source):
                    tainted.add(name)
        return tainted

    def _touches(
        self, node: ast.AST, tainted: set[str], is_source: Callable[[ast.Call], bool]
    ) -> bool:
        return any(
            (isinstance(n, ast.Name) and n.id in tainted)
            or (isinstance(n, ast.Call) and is_source(n))
            for n in ast.walk(node)
        )


def _by_type(tree: ast.AST) -> dict[type, list[Any]]:
    """All nodes by their class, in the order of the text as far as breadth allows."""
    found: dict[type, list[Any]] = defaultdict(list)
    level: list[ast.AST] = [tree]
    while level:
        below: list[ast.AST] = []
        for node in level:
            found[type(node)].append(node)
            for field in node._fields:
                value = getattr(node, field, None)
                if isinstance(value, ast.AST):
                    below.append(value)
                elif isinstance(value, list):
                    below += [v for v in value if isinstance(v, ast.AST)]
        level = below
    return found
