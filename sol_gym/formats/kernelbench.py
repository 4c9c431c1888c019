"""KernelBench files: a `Model`, `get_inputs` and `get_init_inputs`, made a problem.

Such a file times a module whose weights it draws itself. To judge a kernel the weights must be
known to it, so they become inputs: `run` takes what `forward` takes, then every parameter in
`named_parameters` order, and is the file's own module with those parameters put in
(`torch.func.functional_call`). Buffers and whatever else the constructor computes without chance
(masks, position tables, running statistics) stay constants of the problem, readable in the source;
a buffer that differs between two constructions becomes an input like a parameter. The module is in
training mode, as KernelBench runs it.

All inputs come from the file: its `get_inputs` and its own initialisation, drawn anew for each
set. One thing is added: a parameter that is initialised to a single value (a norm's weight of
ones, a bias of zeros) is drawn as that value plus 0.1 N, since else a kernel could leave it out.

What the file computes is found by running it in the sandbox, on meta tensors, so that a file
whose tensors fill a GPU costs nothing to import. This module itself executes nothing.
"""

from __future__ import annotations

import ast
import hashlib
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ProblemError
from ..problem import (
    AxisConst,
    CustomInput,
    Definition,
    Pack,
    Problem,
    TensorSpec,
    Tolerance,
    Workload,
)
from .imported import Imported
from .sandboxed import Sandbox, SandboxFault

_NEEDED = ("Model", "get_inputs", "get_init_inputs")
_PROBE_TIMEOUT_S = 120.0
_TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
"""KernelBench's own absolute and relative tolerance by dtype; every element must pass."""
_DTYPES = {
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
}  # fmt: skip


def is_kernelbench(file: Path) -> bool:
    """Whether a file looks like KernelBench's: it defines `Model`, `get_inputs`, `get_init_inputs`."""
    try:
        return file.suffix == ".py" and not _missing(ast.parse(file.read_text()))
    except (OSError, SyntaxError, ValueError):
        return False


def import_file(
    file: Path, sandbox: Sandbox, settings: Mapping[str, str] | None = None
) -> Imported:
    """A KernelBench file as a problem.

    Args:
        file: the Python file. It is parsed here and executed in the sandbox only.
        sandbox: where.
        settings: top-level constants of the file to replace, name -> Python literal, such as
            ``{"batch_size": "64"}``; the reference is the file with these values.

    Raises:
        ProblemError: the file is not of this form, fails, or has inputs or outputs that are not
            tensors and numbers; names the file and what to do.
    """
    try:
        text = file.read_text()
        missing = _missing(ast.parse(text))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ProblemError(f"{file}: cannot be read as Python: {error}") from None
    if missing:
        raise ProblemError(
            f"{file}: not a KernelBench file: it defines no {', '.join(missing)}; expected "
            f"{', '.join(_NEEDED)} at the top level"
        )
    source = apply_settings(text, settings or {}, str(file))
    try:
        facts = sandbox.call(
            "sol_gym.formats.kernelbench_probe", "probe", {"source": source},
            timeout_s=_PROBE_TIMEOUT_S,
        )  # fmt: skip
        problem = _problem(file, text, source, facts, settings or {})
    except SandboxFault as error:
        hint = "; --set NAME=VALUE makes its sizes smaller" if "memory" in str(error) else ""
        raise ProblemError(f"{file}: cannot be run: {error}{hint}") from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(f"{file}: what it says of itself makes no problem: {error}") from None
    return Imported(problem, remarks=list(map(str, facts["remarks"])))


def apply_settings(text: str, settings: Mapping[str, str], where: str) -> str:
    """Source with the values of top-level assignments replaced by literals.

    Raises:
        ProblemError: no such assignment, or the value is no Python literal.
    """
    if not settings:
        return text
    values: dict[str, ast.expr] = {}
    for node in ast.parse(text).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                values[target.id] = node.value  # type: ignore[attr-defined]
    replaced: dict[int, tuple[ast.expr, dict[str, str]]] = {}
    for name, value in settings.items():
        if name not in values:
            raise ProblemError(
                f"{where}: there is no top-level assignment to {name!r}; it has {sorted(values)}"
            )
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ProblemError(f"{where}: {name}={value!r}: expected a Python literal") from None
        old = values[name]
        replaced.setdefault(id(old), (old, {}))[1][name] = value
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = text.encode()
    for old, named in sorted(replaced.values(), key=lambda item: -item[0].lineno):
        if len(set(named.values())) > 1:
            raise ProblemError(f"{where}: {sorted(named)} are assigned together; give one value")
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[(old.end_lineno or old.lineno) - 1] + (old.end_col_offset or 0)
        data = data[:begin] + next(iter(named.values())).encode() + data[end:]
    return data.decode()


def _missing(tree: ast.Module) -> list[str]:
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    return [name for name in _NEEDED if name not in defined]


# ---- From facts to a problem ----------------------------------------------------------------


def _problem(
    file: Path, text: str, source: str, facts: dict[str, Any], settings: Mapping[str, str]
) -> Problem:
    names = _Names()
    arguments = [(names.take(str(a["name"]), "input"), a) for a in facts["arguments"]]
    weights = [(names.take(str(w["key"]), "weight"), w) for w in facts["weights"]]
    many = len(facts["outputs"]) > 1
    outputs = [
        (names.take(f"output_{i}" if many else "output", "output"), o)
        for i, o in enumerate(facts["outputs"])
    ]
    axes: dict[str, AxisConst] = {}
    name = _identifier(file.stem)
    definition = Definition.model_validate(
        {
            "name": name,
            "op_type": "kernelbench",
            "description": _title(text, file),
            "axes": axes,
            "inputs": {n: _spec(n, a, axes) for n, a in [*arguments, *weights]},
            "outputs": {n: _spec(n, o, axes) for n, o in outputs},
            "custom_inputs_entrypoint": "generate_inputs",
            "reference": _reference(source, arguments, weights),
        }
    )
    tolerance = max(_TOLERANCES.get(str(o["dtype"]), 0.0) for _, o in outputs)
    workload = Workload(
        uuid=hashlib.sha256(source.encode()).hexdigest()[:32],
        axes={},
        inputs={n: CustomInput() for n in definition.inputs},
        tolerance=Tolerance(max_atol=tolerance, max_rtol=tolerance, required_matched_ratio=1.0),
    )
    notes = [f"Imported with {n} = {v}" for n, v in settings.items()]
    if weights:
        notes.append("Inputs after those of forward are the module's weights, drawn anew each time")
    problem_id = f"kernelbench/{name}"
    pack = Pack(
        id=problem_id,
        title=definition.description or name,
        family="kernelbench",
        notes=notes,
        imported_from={
            "format": "kernelbench",
            "source": file.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
    )
    return Problem(id=problem_id, definition=definition, workloads=(workload,), pack=pack)


class _Names:
    """Argument names: identifiers, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, wanted: str, fallback: str) -> str:
        name = _identifier(wanted) or fallback
        if not name[0].isalpha():
            name = f"{fallback}{name if name.startswith('_') else '_' + name}"
        if keyword.iskeyword(name) or name in _RESERVED:
            name += "_"
        unique, count = name, 2
        while unique in self._taken:
            unique, count = f"{name}_{count}", count + 1
        self._taken.add(unique)
        return unique


_RESERVED = {"run", "generate_inputs", "Model", "torch"}


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII).rstrip("_")


def _title(text: str, file: Path) -> str:
    """First line of the class's docstring, else the file's name."""
    model = next(
        n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Model"
    )
    lines = (ast.get_docstring(model) or "").strip().splitlines()
    return lines[0].strip() if lines else f"KernelBench: {file.stem}"


def _spec(name: str, fact: dict[str, Any], axes: dict[str, AxisConst]) -> TensorSpec:
    """A tensor's spec; its sizes become constant axes `n<size>`."""
    dtype = str(fact["dtype"])
    if dtype not in _DTYPES:
        raise ProblemError(f"{name!r} has dtype {dtype}, which no problem can have")
    if fact["shape"] is None:
        return TensorSpec(shape=None, dtype=dtype)  # type: ignore[arg-type]
    shape = []
    for size in map(int, fact["shape"]):
        axes.setdefault(f"n{size}", AxisConst(value=size))
        shape.append(f"n{size}")
    return TensorSpec(shape=shape, dtype=dtype)  # type: ignore[arg-type]


_RULER = "# ---- Added by the import: the module as a function of its inputs and weights ----"


def _reference(
    source: str,
    arguments: list[tuple[str, dict[str, Any]]],
    weights: list[tuple[str, dict[str, Any]]],
) -> str:
    given = [name for name, _ in arguments]
    named = {name: str(w["key"]) for name, w in weights}
    shifted = tuple(name for name, w in weights if w["single_value"])
    cloned = [name for name, w in weights if w["buffer"]]
    call = ", ".join(given) + ("," if len(given) == 1 else "")
    values = ", ".join(f"{n}.clone()" if n in cloned else n for n in named)
    tensors = [name for name, fact in arguments if fact["shape"] is not None] or list(named)
    body = f"""

{_RULER}

import torch as _torch

_ARGUMENTS = {tuple(given)!r}
_WEIGHTS = {named!r}  # argument of run -> parameter of Model
_SINGLE_VALUED = {shifted!r}  # drawn with noise: else a kernel could leave them out
_models = {{}}


def _construct(device):
    with _torch.device(device):
        return Model(*get_init_inputs())


def _model(device):
    \"\"\"The module for a device, its weights taken out: run puts its own in.\"\"\"
    if device not in _models:
        model = _construct(device)
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    empty = _torch.empty_like(weight, device="meta")
                    setattr(module, name, _torch.nn.Parameter(empty, requires_grad=False))
        _models[device] = model
    return _models[device]


def _flat(returned):
    if isinstance(returned, _torch.Tensor):
        return [returned]
    return [tensor for item in returned for tensor in _flat(item)]


def run({", ".join([*given, *named])}):
    weights = dict(zip(_WEIGHTS.values(), ({values}{"," if len(named) == 1 else ""})))
    returned = _torch.func.functional_call(_model({tensors[0]}.device), weights, ({call}))
    outputs = _flat(returned)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def generate_inputs(axes_and_scalars, device):
    model = _construct(device)
    with _torch.device(device):
        made = dict(zip(_ARGUMENTS, get_inputs()))
    state = {{**dict(model.named_parameters()), **dict(model.named_buffers())}}
    for name, key in _WEIGHTS.items():
        weight = state[key].detach()
        noise = 0.1 * _torch.randn_like(weight) if name in _SINGLE_VALUED else 0
        made[name] = weight + noise if name in _SINGLE_VALUED else weight
    return made
"""
    return source.rstrip() + body
