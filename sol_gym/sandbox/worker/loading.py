"""Turning a solution's files into a callable: Python modules, torch extensions, C functions."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any


class LoadError(Exception):
    """The solution's files do not give a callable; the message is for its author."""


def load(message: dict[str, Any]) -> tuple[Callable, bool]:
    """The entry function and whether it takes its outputs as arguments (destination passing)."""
    n_inputs, n_outputs = len(message["inputs"]), len(message["outputs"])
    binding = message["binding"]
    if binding == "ctypes":
        return _c_function(message), True
    if binding == "torch":
        function = getattr(_extension(message["library"]), message["entry_function"], None)
    else:
        function = getattr(
            _module(message["dir"], message["entry_file"]), message["entry_function"], None
        )
    if not callable(function):
        raise LoadError(
            f"{message['entry_file']} defines no function {message['entry_function']!r}; "
            "the entry point must be a module-level function"
        )
    dps = message["dps"]
    return function, told_from_signature(function, n_inputs, n_outputs) if dps is None else bool(
        dps
    )


def told_from_signature(function: Callable, n_inputs: int, n_outputs: int) -> bool:
    """Whether `function` takes inputs and outputs (True) or inputs only (False).

    Raises:
        LoadError: it takes neither number of arguments.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # A pybind11 function states its signature in its docstring: "run(arg0: ..., arg1: ...) -> ...".
        first = (function.__doc__ or "").split("\n")[0]
        count = len(re.findall(r"\barg\d+\b|\b\w+: ", first.split("->")[0]))
        return count != n_inputs
    positional = [
        p for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    required = sum(p.default is p.empty for p in positional)
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for count, dps in ((n_inputs + n_outputs, True), (n_inputs, False)):
        if required == count or (dps is False and required <= count <= len(positional)):
            return dps
    if takes_any:
        return False
    raise LoadError(
        f"run() takes {required} required arguments; expected {n_inputs} (inputs; outputs are returned) "
        f"or {n_inputs + n_outputs} (inputs, then outputs to write into)"
    )


def _module(folder: str, entry_file: str) -> Any:
    path = os.path.join(folder, entry_file)
    sys.path.insert(0, os.path.dirname(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = "solution_" + re.sub(r"\W", "_", entry_file.removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{entry_file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _extension(library: str) -> Any:
    name = os.path.basename(library).split(".")[0]
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise LoadError(f"{library} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _c_function(message: dict[str, Any]) -> Callable:
    """An extern "C" function: pointers and scalars in call order, var axes as int64, then the stream."""
    library = ctypes.CDLL(message["library"])
    try:
        raw = getattr(library, message["entry_function"])
    except AttributeError:
        raise LoadError(
            f'{message["entry_file"]} exports no extern "C" function {message["entry_function"]!r}'
        ) from None
    raw.restype = None
    on_gpu = message["device"] == "cuda"
    axes: list[int] = []

    def call(*arguments: Any) -> None:
        converted = [_as_c(a) for a in arguments]
        converted += [ctypes.c_int64(a) for a in axes]
        if on_gpu:
            import torch

            converted.append(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        raw(*converted)

    call.axes = axes  # type: ignore[attr-defined]  # filled at every bind
    return call


def _as_c(value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_int64(int(value))
