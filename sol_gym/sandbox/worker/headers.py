"""Light headers in the place of torch's, which are what a build with a torch binding waits for.

`torch/extension.h` declares all of torch's C++ frontend and pybind11, and nvcc parses it three times.
A folder that stands before torch's on the include path has a header of that name (and of the names
of its like) with the tensor class, a small PYBIND11_MODULE and just those operators that the sources
name. What it lacks is a compile error. Most compile errors are their author's, though, and would
come again, after a long wait, with torch's own headers: those are tried only where they might help.
"""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

with open(os.path.join(os.path.dirname(__file__), "extension.h")) as _file:
    _EXTENSION = _file.read()  # Now: a worker cannot see this folder.

_HEADER = "torch/extension.h"
_FORWARDED = ("torch/torch.h", "torch/all.h", "torch/types.h", "torch/python.h", "ATen/ATen.h")
"""Others that bring in all of torch; each includes `_HEADER` alone."""
_WHERE_NAMED = (
    (r"AT_DISPATCH", "ATen/Dispatch.h"),
    (r"\bparallel_for\b|\bparallel_reduce\b", "ATen/Parallel.h"),
    (r"\bNoGradGuard\b|\bGradMode\b", "ATen/core/grad_mode.h"),
    (r"\b(cat|stack|concat|vstack|hstack)\s*\(", "ATen/core/IListRef.h"),
    (r"\bcout\b|\bcerr\b|stringstream", "ATen/core/Formatting.h"),
    (r"\bindexing\b|\.index(_put_)?\s*\(", "ATen/TensorIndexing.h"),
)
"""Headers that torch's own would bring and few sources need."""
_HEAVY = re.compile(
    r"^#include <ATen/(Context|DeviceGuard|TensorUtils|TracerMode|Functions|ops/empty_like)\.h>$",
    re.M,
)
_WRAP = re.compile(r"PyObject\*\s+THPVariable_Wrap\((const at::TensorBase&|at::TensorBase) var\);")
_TORCHS = re.compile(
    r"\b(torch|at|aten|c10|caffe2|pybind11|py|light_binding)\b|extension\.h|\bTHP|\bPy"
)
_UNFINISHED = re.compile(r"undefined reference|incomplete type|undefined symbol")
_PREPROCESS_S = 60.0


def write_light(message: dict[str, Any]) -> str | None:
    """Write the folder for a request's sources; its path, or None where this torch has no place for it."""
    from torch.utils import cpp_extension

    folders = cpp_extension.include_paths()
    declared = _WRAP.search(_read("torch/csrc/autograd/python_variable.h", folders))
    text = _sources(message)
    defined = re.findall(r'\.\s*def\s*\(\s*"(\w+)"', text)
    overloads = len(defined) > len(set(defined))  # Two definitions: pybind11 chooses by the types.
    if not declared or overloads or re.search(r"\busing\s+namespace\s+(torch|at)\b", text):
        return None
    names = sorted({"empty_like", *re.findall(r"\b(?:torch|at)::(\w+)\s*\(", text)})
    light = os.path.join(message["dir"], "light")
    wanted = []
    for name in (*(f"ATen/ops/{name}.h" for name in names), "ATen/TensorOperators.h"):
        if found := _read(name, folders):
            _write(light, name, _HEAVY.sub("", found))
            wanted.append(name)
    wanted += [name for rule, name in _WHERE_NAMED if re.search(rule, text)]
    header = _EXTENSION.replace("//@operators", "\n".join(f"#include <{n}>" for n in wanted))
    header = header.replace("//@wrap", f"PyObject* THPVariable_Wrap({declared[1]} var);")
    _write(light, _HEADER, header)
    for name in _FORWARDED:
        _write(light, name, f"#include <{_HEADER}>\n")
    return light


def full_might_help(errors: str, message: dict[str, Any], compiler: list[str]) -> bool:
    """Whether torch's own headers might compile what the light ones did not.

    Not so where every error is about names that torch's headers do not have either.

    Args:
        errors: what the compiler printed.
        message: the build's request.
        compiler: command and flags, without the light folder.
    """
    lines = [line for line in errors.splitlines() if "error" in line.lower()]
    said = " ".join(re.sub(r"^\S+?[:(]\d+\S*", "", line) for line in lines)
    if not lines or _TORCHS.search(said) or _UNFINISHED.search(errors) or "extension.h" in errors:
        return True
    quoted = " ".join(re.findall(r"['\"`‘]([^'\"’]+)['\"’]", said))
    wanted = set(re.findall(r"[A-Za-z_]\w*", quoted))
    folder = os.path.join(message["dir"], "light")
    probe = _write(folder, "probe.cpp", f"#include <{_HEADER}>\n")
    try:
        before = [*compiler[:1], f"-I{folder}", *compiler[1:]]
        with ThreadPoolExecutor(max_workers=2) as pool:
            full, light = pool.map(_preprocessed, ([*compiler, probe], [*before, probe]))
    except (OSError, subprocess.SubprocessError):
        return True
    return bool(wanted & (full - light))


def _preprocessed(command: list[str]) -> set[str]:
    """All words, macros' names among them, that the preprocessor leaves."""
    done = subprocess.run(
        [*command, "-E", "-dD"], capture_output=True, check=True, timeout=_PREPROCESS_S, text=True,
        errors="replace",
    )  # fmt: skip
    return set(re.findall(r"[A-Za-z_]\w*", done.stdout))


def _write(folder: str, name: str, text: str) -> str:
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    return path


def _sources(message: dict[str, Any]) -> str:
    text = ""
    for path in message["sources"]:
        with open(os.path.join(message["dir"], "src", path), errors="replace") as file:
            text += file.read()
    return text


def _read(name: str, folders: list[str]) -> str:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with open(path) as file:
                return file.read()
    return ""
