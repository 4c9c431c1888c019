"""The judge's side of building: what may be compiled, with which flags, and the cache of results.

Artifacts are cached by the content of the solution, the stack and the architecture. They were
made inside a sandbox and are only ever loaded inside one.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..solution import Solution

_FLAG = re.compile(
    r"-O[0-3s]|-Ofast|--?std=(c|gnu)\+\+\d+|-g|-G|-lineinfo|--?use_fast_math|-D\w+(=[\w.:+-]*)?|-U\w+"
    r"|--?expt-(relaxed-constexpr|extended-lambda)|--extended-lambda|--?maxrregcount=?\d*"
    r"|-f(?!plugin|dump|profile|use-ld|save)[a-z0-9-]+(=[\w-]+)?|-m[a-z0-9.=-]+|-W(?![lpa],)[\w=-]*|-w|-pthread"
    r"|-(gen)?code=?[\w=,]+|-arch=?\w+|-gencode=[\w=,]+|--threads=?\d*|-t=?\d+"
    r"|--?(fmad|ftz|prec-div|prec-sqrt|extra-device-vectorization|restrict)(=(true|false))?"
)
_LIBRARY = re.compile(
    r"-l(cuda|cudart|cublas|cublasLt|cudnn|cufft|curand|cusparse|cusolver|nvrtc|nvJitLink|c10|c10_cuda"
    r"|torch|torch_cpu|torch_cuda|torch_python|m|gomp|pthread|dl|rt|stdc\+\+)|-pthread|-fopenmp"
)
_VALUE_FLAGS = {"-Xptxas": re.compile(r"(-O[0-3]|-v|-warn-spills|-dlcm=c[agv]|--allow-expensive-optimizations=true|,)+"),
                "-gencode": re.compile(r"[\w=,]+"),
                "-Xcompiler": _FLAG}  # fmt: skip


class FlagRefused(Exception):
    """A compiler flag is not on the allow-list."""


def binding_of(solution: Solution) -> str:
    """`python`, `torch` (a function of tensors) or `ctypes` (an extern "C" function of pointers)."""
    if solution.spec.is_python:
        return "python"
    if solution.spec.binding:
        return solution.spec.binding
    text = solution.source_text
    uses_torch = re.search(r"#include\s*<(torch|ATen|c10)/|PYBIND11_MODULE", text)
    return "torch" if uses_torch or 'extern "C"' not in text else "ctypes"


def checked_flags(solution: Solution) -> dict[str, list[str]]:
    """The solution's flags, all of them allowed.

    Raises:
        FlagRefused: naming the flag. Flags that read files, load plug-ins or change the linker's
            behaviour are refused.
    """
    options = solution.spec.compile_options
    cflags = list(options.cflags) if options else []
    cuda = list(options.cuda_cflags) if options else ["-O3", "--use_fast_math"]
    link = list(options.ld_flags) if options else []
    for flags in (cflags, cuda):
        _check(flags)
    for flag in link:
        if not _LIBRARY.fullmatch(flag):
            raise FlagRefused(
                f"linker flag {flag!r} is not allowed; allowed are -l of CUDA, torch and system libraries"
            )
    return {"cflags": cflags, "cuda_cflags": cuda, "ld_flags": link}


def _check(flags: list[str]) -> None:
    expect: re.Pattern | None = None
    for flag in flags:
        if expect is not None:
            if not expect.fullmatch(flag):
                raise FlagRefused(f"compiler flag value {flag!r} is not allowed")
            expect = None
        elif flag in _VALUE_FLAGS:
            expect = _VALUE_FLAGS[flag]
        elif not _FLAG.fullmatch(flag):
            raise FlagRefused(
                f"compiler flag {flag!r} is not allowed; see docs/solutions.md for those that are"
            )


class BuildCache:
    """Shared libraries by content."""

    def __init__(self, folder: Path):
        self._folder = folder

    def key(self, solution: Solution, stack: dict[str, Any]) -> str:
        """Identity of a build: sources, spec, and the stack it is for."""
        text = f"{solution.content_hash} {sorted(stack.items())}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def get(self, key: str) -> Path | None:
        """The cached library, if there is one."""
        found = sorted(self._folder.glob(f"{key}/*.so"))
        return found[0] if found else None

    def put(self, key: str, name: str, fd: int) -> Path:
        """Copy a library in from an open file, which is closed; a concurrent writer is harmless."""
        with open(fd, "rb") as source:
            self._folder.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(dir=self._folder))
            with open(staging / name, "wb") as target:
                shutil.copyfileobj(source, target)
        try:
            staging.rename(self._folder / key)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
        return self._folder / key / name
