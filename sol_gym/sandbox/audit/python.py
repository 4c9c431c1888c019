"""Reading Python: what `resolve` says a name or a text means is looked up in the rules' tables."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from functools import cached_property
from pathlib import PurePosixPath

from ...evaluation import Severity
from . import names, text
from .report import Report
from .resolve import HOLE, Names

_BUILTINS = frozenset(dir(builtins))
_MODES = ("torch.overrides.TorchFunctionMode", "torch.utils._python_dispatch.TorchDispatchMode")
_TENSORS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.Parameter")
_PROTOCOLS = {"__torch_function__", "__torch_dispatch__"}
_LAZY_METHODS = {"__iter__", "__getitem__", "__len__", "__next__"}
_CONTAINERS = {"tuple", "list", "dict", "collections.OrderedDict", "collections.UserDict", "collections.UserList",
               "collections.abc.Sequence", "collections.abc.Mapping"}  # fmt: skip
_LONG_TABLE = 512
_MAX_INNER = 4
_CODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_PLAIN_CODINGS = {"utf-8", "utf8", "ascii", "us-ascii", "utf-8-sig", "latin-1", "iso-8859-1"}


def read_python(source: str, report: Report, *, depth: int = 0) -> list[tuple[str, int]]:
    """Report what the rules find in a Python source.

    Returns:
        C++ or CUDA sources found in its strings, with the line each begins at.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it does not parse.
    """
    tree = ast.parse(source)
    _check_coding(source, report)
    reader = _Reader(tree, report, depth)
    reader.check()
    return reader.inner_cpp


def check_file_name(path: str, report: Report) -> None:
    """A file that would be imported in the place of somebody else's module."""
    pure = PurePosixPath(path)
    top = pure.parts[0].removesuffix(".py")
    if top in names.IMPORTED_BY_OTHERS:
        report.add("shadowed-module", 0, path)
    elif len(pure.parts) == 1 and top in sys.stdlib_module_names:
        report.add("shadowed-module", 0, path, severity=Severity.SUSPICIOUS)
    if pure.suffix in (".pth", ".so", ".pyc", ".cubin", ".fatbin", ".o", ".a"):
        report.add("embedded-binary", 0, path)


def _check_coding(source: str, report: Report) -> None:
    for number, line in enumerate(source.split("\n", 2)[:2], 1):
        found = _CODING.match(line)
        if found and found.group(1).lower().replace("_", "-") not in _PLAIN_CODINGS:
            report.add("source-encoding", number, found.group(1))


class _Reader(Names):
    def __init__(self, tree: ast.Module, report: Report, depth: int):
        super().__init__(tree)
        self.report, self.depth = report, depth
        self.inner_cpp: list[tuple[str, int]] = []
        self._find_script_part()
        self.decoded = self.tainted_by(self._is_decode)
        self.addresses = self.tainted_by(_is_id)

    def _find_script_part(self) -> None:
        if any(name == "__name__" for name, _ in self.assigned):
            return
        for node in self.tree.body:
            if (
                isinstance(node, ast.If) and isinstance(node.test, ast.Compare)
                and isinstance(node.test.left, ast.Name) and node.test.left.id == "__name__"
                and isinstance(node.test.ops[0], ast.Eq)
                and isinstance(node.test.comparators[0], ast.Constant)
                and node.test.comparators[0].value == "__main__"
            ):  # fmt: skip
                last = node.body[-1]
                self.report.notes_only.append((node.body[0].lineno, last.end_lineno or last.lineno))

    def _is_decode(self, call: ast.Call) -> bool:
        name = self.dotted(call.func)
        if name and _matches(name, names.DECODERS):
            return True
        return isinstance(call.func, ast.Attribute) and call.func.attr in ("fromhex", "unhexlify")

    def check(self) -> None:
        """Report everything."""
        nodes = self.nodes
        documentation = {n.value for n in nodes[ast.Expr] if isinstance(n.value, ast.Constant)}
        for node in nodes[ast.Name]:
            if node.id in self.aliases:
                self._name(node)
        for node in nodes[ast.Attribute]:
            self._name(node)
        for node in nodes[ast.Call]:
            self._call(node)
        for node in nodes[ast.Constant]:
            if isinstance(node.value, str | bytes):
                self._literal(node, node.value, node in documentation)
        for node in nodes[ast.JoinedStr]:
            self._place(node, self.constant(node))
        for node in nodes[ast.BinOp]:
            if isinstance(node.op, ast.Add | ast.Div):
                self._place(node, self.constant(node))
        for kind in (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete):
            for node in nodes[kind]:
                self._assignment(node)
        for node in nodes[ast.Import] + nodes[ast.ImportFrom]:
            self._import(node)
        for node in nodes[ast.ClassDef]:
            self._class(node)
        for node in nodes[ast.List] + nodes[ast.Tuple]:
            self._table(node)
        for node in nodes[ast.Compare]:
            self._compare(node)
        for node in nodes[ast.Subscript]:
            self._subscript(node)
        for node in nodes[ast.Dict]:
            for key in node.keys:
                self._pointer_key(key)
        self._whole_file()

    def _look_up(self, name: str, line: int) -> None:
        rule = names.PYTHON_NAMES.get(name)
        if rule is None:
            parts = name.split(".")
            for end in range(len(parts) - 1, 0, -1):
                rule = names.PYTHON_NAMES.get(".".join(parts[:end]) + ".")
                if rule:
                    break
        if rule:
            self.report.add(rule, line, name)

    def _name(self, node: ast.Name | ast.Attribute) -> None:
        if isinstance(node, ast.Attribute):
            rule = names.ATTRIBUTES.get(node.attr)
            if node.attr.startswith("cupti"):
                rule = "profiler-control"
            if rule and isinstance(node.ctx, ast.Load):
                self.report.add(rule, node.lineno, f".{node.attr}")
        if isinstance(node.ctx, ast.Load):
            name = self.dotted(node)
            if name and "." in name:
                self._look_up(name, node.lineno)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            modules = [a.name for a in node.names]
        elif node.level or not node.module:
            return
        else:
            modules = [node.module] + [f"{node.module}.{a.name}" for a in node.names]
        for module in modules:
            rule = names.PYTHON_NAMES.get(module.split(".")[0] + ".")
            if rule in ("judge-import", "network", "native-library", "profiler-control"):
                # Importing is not using; sol_gym has no other use.
                severity = None if rule == "judge-import" else Severity.SUSPICIOUS
                self.report.add(rule, node.lineno, f"import {module}", severity=severity)
            elif module == "_thread":
                self.report.add("unjoined-work", node.lineno, "import _thread")

    # -- calls --------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        name = self.dotted(node.func) or ""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        line = node.lineno
        arguments = [*node.args, *(k.value for k in node.keywords)]
        if (_matches(name, names.RUNNERS) or method in names.RUNNER_METHODS) and any(
            self._touches(a, self.decoded, self._is_decode) for a in arguments
        ):
            self.report.add("hidden-code", line, name or method)
        if name == "types.CodeType":
            self.report.add("hidden-code", line, "byte code")
        elif name in ("exec", "eval", "compile"):
            self._dynamic(node, name)
        elif name in ("setattr", "delattr") and node.args:
            self._patched(node.args[0], "<name>", line)
        elif name == "getattr" and len(node.args) >= 2:
            self._computed_attribute(node)
        elif name == "__import__" or name == "importlib.import_module":
            self._computed_import(node)
        elif name == "open" or name.endswith("io.open") or name == "os.open":
            self._open(node)
        elif name in ("ctypes.CDLL", "ctypes.cdll.LoadLibrary", "torch.ops.load_library"):
            self._library(node)
        elif name == "os._exit":
            forks = any(n.attr == "fork" for n in self.nodes[ast.Attribute])
            self.report.add(
                "early-exit", line, name, severity=Severity.SUSPICIOUS if forks else None
            )
        elif name in ("os.environ.get", "os.getenv") and node.args:
            self._environment(node.args[0], line)
        elif name in (
            "os.environ.items",
            "os.environ.keys",
            "os.environ.values",
            "os.environ.copy",
        ):
            self.report.add("environment-gate", line, name)
        elif name.startswith("sys.modules.") and method in ("values", "items", "keys"):
            self.report.add("modules-walk", line, name)
        elif name.startswith("unittest.mock.patch"):
            self._mocked(node, name)
        elif name.startswith(("subprocess.", "os.system", "os.popen", "os.exec", "os.spawn")):
            self._command(node)
        elif name in ("exit", "quit"):
            self.report.add("process-exit", line, f"{name}()")
        if method == "from_address":
            id_used = any(
                self._touches(a, self.addresses, _is_id)
                for a in arguments
            )  # fmt: skip
            self.report.add("memory-edit" if id_used else "address-access", line, ".from_address")
        elif method == "cast" and name.startswith("ctypes") and node.args:
            if self._touches(node.args[0], self.addresses, _is_id):  # fmt: skip
                self.report.add("memory-edit", line, "ctypes.cast of id()")
        elif method in ("write_text", "write_bytes", "unlink", "rename", "touch"):
            where = self.constant(node.func.value) if isinstance(node.func, ast.Attribute) else None
            self._written(where, line)
        elif method == "__enter__":
            self._entered(node)
        elif method in ("dlopen",) and name.startswith("cffi"):
            self.report.add("native-library", line, name)

    def _mocked(self, node: ast.Call, name: str) -> None:
        target = self.constant(node.args[0]) or self.dotted(node.args[0]) if node.args else None
        watched = isinstance(target, str) and target.split(".")[0] in names.WATCHED
        self.report.add(
            "patch-runtime", node.lineno, name, severity=None if watched else Severity.SUSPICIOUS
        )

    def _dynamic(self, node: ast.Call, name: str) -> None:
        code = self.constant(node.args[0]) if node.args else None
        if isinstance(code, bytes):
            code = code.decode("utf-8", "replace")
        if code is None or HOLE in code:
            self.report.add("dynamic-code", node.lineno, f"{name}()")
            return
        if self.depth >= _MAX_INNER:
            self.report.add("dynamic-code", node.lineno, f"{name}() many levels deep")
            return
        inner = Report(self.report.file, code, node.lineno)
        try:
            self.inner_cpp += read_python(code, inner, depth=self.depth + 1)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.report.add("dynamic-code", node.lineno, f"{name}()")
            return
        for finding in inner.findings:
            self.report.add(finding.rule, node.lineno, f"in a text that is run by {name}()", severity=finding.severity)  # fmt: skip

    def _computed_attribute(self, node: ast.Call) -> None:
        owner, attribute = self.dotted(node.args[0]), self.constant(node.args[1])
        known = isinstance(attribute, str) and HOLE not in attribute
        if (
            owner
            and not known
            and owner.split(".")[0] in names.SENSITIVE_MODULES
            and owner.count(".") <= 1
        ):
            severity = Severity.NOTE if owner.startswith("torch") else None
            self.report.add(
                "obfuscated-access", node.lineno, f"getattr({owner}, ...)", severity=severity
            )
        elif (
            known
            and not isinstance(node.args[1], ast.Constant)
            and not isinstance(node.args[1], ast.Name)
        ):
            self.report.add(
                "obfuscated-access", node.lineno, f"getattr(..., {attribute!r} in pieces)"
            )
        if isinstance(attribute, str):
            rule = names.ATTRIBUTES.get(attribute)
            if rule:
                self.report.add(rule, node.lineno, f"getattr(..., {attribute!r})")
            name = self.dotted(node)
            if name and "." in name:
                self._look_up(name, node.lineno)
                if name == "os._exit":
                    self.report.add("early-exit", node.lineno, name)

    def _computed_import(self, node: ast.Call) -> None:
        module = self.constant(node.args[0]) if node.args else None
        if not isinstance(module, str) or HOLE in module:
            self.report.add("obfuscated-access", node.lineno, "an import by a computed name")
        else:
            self._look_up(module + ".", node.lineno)
            if module == "sol_gym" or module.startswith("sol_gym."):
                self.report.add("judge-import", node.lineno, f"import {module}")

    def _open(self, node: ast.Call) -> None:
        where = self.constant(node.args[0]) if node.args else None
        mode: object = "r"
        for value in [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]:
            mode = self.constant(value)
        flags = " ".join(n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute))
        writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or any(
            flag in flags for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")
        )
        if writes:
            self._written(where, node.lineno)
        elif not (
            node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == "__file__"
        ):
            self.report.add("file-access", node.lineno, "open()")

    def _written(self, where: str | bytes | None, line: int) -> None:
        if isinstance(where, str) and text.is_system_path(where):
            self.report.add("system-write", line, where.replace(HOLE, "?"))
        else:
            self.report.add("file-write", line)

    def _library(self, node: ast.Call) -> None:
        argument = node.args[0] if node.args else None
        path = self.constant(argument) if argument is not None else None
        base = PurePosixPath(path).name if isinstance(path, str) else ""
        if base.startswith(names.CUDA_LIBRARIES):
            return
        if isinstance(argument, ast.Name) and path is None and argument.id != "None":
            self.report.add("native-library", node.lineno, "a library by a computed name", severity=Severity.NOTE)  # fmt: skip
            return
        self.report.add("native-library", node.lineno, base or "the process itself")

    def _environment(self, key: ast.AST, line: int) -> None:
        variable = self.constant(key)
        if variable is None or (isinstance(variable, str) and text.is_phase_variable(variable)):
            self.report.add("environment-gate", line, str(variable or "a computed variable"))

    def _entered(self, node: ast.Call) -> None:
        modes = {
            c.name for c in self.nodes[ast.ClassDef]
            if any((self.dotted(b) or "").endswith(("FunctionMode", "DispatchMode")) for b in c.bases)
        }  # fmt: skip
        if modes:
            self.report.add("global-mode", node.lineno, f"{', '.join(sorted(modes))}.__enter__()")

    # -- assignments --------------------------------------------------------------------------

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> None:
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        flat: list[ast.expr] = []
        for target in targets:
            flat += target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for target in flat:
            if isinstance(target, ast.Attribute):
                self._patched(target.value, target.attr, node.lineno)
                self._stored_on_input(target)
            elif isinstance(target, ast.Subscript):
                if self._is_modules(target.value):
                    key = self.constant(target.slice)
                    own = isinstance(target.slice, ast.Name)
                    watched = isinstance(key, str) and key.split(".")[0] in (*names.WATCHED, "triton", "numpy")  # fmt: skip
                    self.report.add(
                        "patch-runtime" if watched else "modules-walk", node.lineno, f"sys.modules[{key!r}]",
                        severity=Severity.NOTE if own else None,
                    )  # fmt: skip
                elif (isinstance(target.value, ast.Attribute) and target.value.attr == "__dict__") or (
                    isinstance(target.value, ast.Call) and isinstance(target.value.func, ast.Name)
                    and target.value.func.id == "vars"
                ):  # fmt: skip
                    self._patched(target.value, "<name>", node.lineno)
                if not isinstance(node, ast.Delete):
                    self._pointer_key(target.slice)

    def _patched(self, owner: ast.AST, attribute: str, line: int) -> None:
        """A name of a watched module that is replaced."""
        base = self.dotted(owner)
        if not base:
            return
        name = f"{base}.{attribute}"
        if "config" in name or name.startswith(names.SETTINGS) or attribute in names.LABELS:
            return
        if (name.startswith(names.INTERNALS) and not name.startswith("triton.testing.")) or any(
            first <= line <= last for first, last in self._shims
        ):
            self.report.add("patch-runtime", line, name, severity=Severity.SUSPICIOUS)
        elif any(name.startswith(module + ".") for module in names.WATCHED):
            self.report.add("patch-runtime", line, name)

    @cached_property
    def _shims(self) -> list[tuple[int, int]]:
        """Lines under `if not hasattr(...)`: what an older release lacks is added, not replaced."""
        return [
            (node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno)
            for node in self.nodes[ast.If]
            if isinstance(node.test, ast.UnaryOp)
            and isinstance(node.test.op, ast.Not)
            and isinstance(node.test.operand, ast.Call)
            and isinstance(node.test.operand.func, ast.Name)
            and node.test.operand.func.id == "hasattr"
        ]

    def _stored_on_input(self, target: ast.Attribute) -> None:
        run = self.functions.get("run")
        if run and isinstance(target.value, ast.Name):
            own = {a.arg for a in (*run.args.posonlyargs, *run.args.args)}
            if target.value.id in own:
                self.report.add(
                    "input-attribute", target.lineno, f"{target.value.id}.{target.attr}"
                )

    # -- expressions --------------------------------------------------------------------------

    def _literal(self, node: ast.Constant, value: str | bytes, documentation: bool) -> None:
        kind = text.embedded(value)
        if kind:
            self.report.add("embedded-binary", node.lineno, kind)
        elif text.looks_encoded(value):
            self.report.add("encoded-literal", node.lineno, f"{len(value)} characters")
        if documentation or isinstance(value, bytes):
            return
        self._place(node, value)
        if len(value) > 40 and (
            "__global__" in value or "#include" in value or 'extern "C"' in value
        ):
            lines = (node.end_lineno or node.lineno) - node.lineno
            triple = value.count("\n") == lines  # Written over several lines: lines correspond.
            self.inner_cpp.append((value, node.lineno if triple else 0))

    def _place(self, node: ast.expr, value: str | bytes | None) -> None:
        if isinstance(value, str) and len(value) < 20_000 and (found := text.place(value)):
            self.report.add(found[0], node.lineno, found[1], severity=found[2])

    def _command(self, node: ast.Call) -> None:
        words = [
            n.value
            for n in ast.walk(node)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        if found := text.command(" ".join(words)):
            self.report.add(found[0], node.lineno, found[1])

    def _table(self, node: ast.List | ast.Tuple) -> None:
        if len(node.elts) < 16:
            return
        values = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        if len(values) != len(node.elts):
            return
        if all(isinstance(v, str) for v in values):
            if kind := text.embedded("".join(map(str, values))):
                self.report.add("embedded-binary", node.lineno, kind)
            return
        numbers = [v for v in values if isinstance(v, int)]
        if len(numbers) == len(values) and (kind := numbers_hold_binary(numbers)):
            self.report.add("embedded-binary", node.lineno, kind)
        elif len(values) >= _LONG_TABLE:
            self.report.add("long-table", node.lineno, f"{len(values)} values")

    def _compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        literal = any(
            isinstance(s, ast.Tuple | ast.List | ast.Set) and s.elts
            and any(isinstance(c, ast.Constant) and isinstance(c.value, int) and c.value > 1 for c in ast.walk(s))
            for s in sides
        )  # fmt: skip
        shaped = literal and any(
            isinstance(n, ast.Attribute) and n.attr in ("shape", "numel", "size")
            for s in sides
            for n in ast.walk(s)
        )
        if shaped:
            self.report.add("shape-literal", node.lineno)
        if not self._counters:
            return
        if any(isinstance(s, ast.Constant) and isinstance(s.value, int) for s in sides) and any(
            isinstance(n, ast.Name) and n.id in self._counters for n in ast.walk(node)
        ):
            self.report.add("call-count", node.lineno)

    @cached_property
    def _counters(self) -> set[str]:
        """Global variables that are counted up or down."""
        counted = {n.target.id for n in self.nodes[ast.AugAssign] if isinstance(n.target, ast.Name)}
        return counted & {n for g in self.nodes[ast.Global] for n in g.names}

    def _subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load):
            if self.dotted(node.value) == "os.environ":
                self._environment(node.slice, node.lineno)
            self._pointer_key(node.slice)

    def _pointer_key(self, key: ast.AST | None) -> None:
        if key is not None and not isinstance(key, ast.Constant | ast.Name | ast.Slice):
            for n in ast.walk(key):
                if isinstance(n, ast.Attribute) and n.attr == "data_ptr":
                    self.report.add("pointer-key", n.lineno, "a key made of data_ptr()")

    def _class(self, node: ast.ClassDef) -> None:
        bases = [self.dotted(b) or "" for b in node.bases]
        methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        is_mode = any("Mode" in b for b in bases)
        if any(b in _TENSORS for b in bases) or (methods & _PROTOCOLS and not is_mode):
            self.report.add("tensor-subclass", node.lineno, node.name)
        if any(b in _CONTAINERS for b in bases) and methods & _LAZY_METHODS:
            self.report.add("lazy-container", node.lineno, node.name)

    # -- the whole file -----------------------------------------------------------------------

    def _whole_file(self) -> None:
        calls = self.nodes[ast.Call]
        methods = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)}
        named = {name: c for c in calls if (name := self.dotted(c.func))}
        for creator in ("threading.Thread", "threading.Timer"):
            if creator in named and "join" not in methods:
                self.report.add("unjoined-work", named[creator].lineno, creator)
        if "_thread.start_new_thread" in named:
            self.report.add("unjoined-work", named["_thread.start_new_thread"].lineno, "_thread.start_new_thread")  # fmt: skip
        if "torch.cuda.Stream" in named:
            waits = sum(
                isinstance(c.func, ast.Attribute) and c.func.attr in ("wait_stream", "wait_event", "synchronize", "wait")
                for c in calls
            )  # fmt: skip
            if waits < 2:
                self.report.add("unjoined-work", named["torch.cuda.Stream"].lineno, "a stream that the caller's stream does not wait for")  # fmt: skip


def _is_id(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "id"


def _matches(name: str, table: tuple[str, ...]) -> bool:
    return any(name == entry or (entry.endswith(".") and name.startswith(entry)) for entry in table)


def numbers_hold_binary(numbers: list[int]) -> str | None:
    """Machine code written out as bytes or as little-endian words."""
    if all(0 <= n < 256 for n in numbers):
        return text.binary_in(bytes(numbers[:4096]))
    for width in (4, 8):
        if all(0 <= n < 1 << 8 * width for n in numbers):
            return text.binary_in(b"".join(n.to_bytes(width, "little") for n in numbers[:1024]))
    return None
