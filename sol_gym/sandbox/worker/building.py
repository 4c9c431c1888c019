"""Compiling C++ and CUDA sources, inside a sandboxed process of its own.

Only flags on an allow-list reach a compiler (the judge checks before it asks). Sources compile in
parallel. torch's headers decide the time, so a first attempt is made with light ones (headers.py);
if that does not compile, and torch's own might, they are used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import headers

_CUDA_SUFFIX, _HOST_SUFFIXES = ".cu", (".cpp", ".cc", ".cxx", ".c")
_NVCC_TORCH_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr",
]  # fmt: skip
MODULE_NAME = "solution_extension"


class BuildFailed(Exception):
    """A compiler refused; the message is its output."""


def build(message: dict[str, Any]) -> str:
    """Compile the request's sources; returns the path of the shared library."""
    out = os.path.join(message["dir"], "build")
    os.makedirs(out, exist_ok=True)
    sources = [
        os.path.join(message["dir"], "src", path)
        for path in message["sources"]
        if path.endswith((_CUDA_SUFFIX, *_HOST_SUFFIXES))
    ]
    if message["binding"] == "ctypes":
        return _compile_and_link(
            message, sources, out, _plain_flags(message), "solution_library.so"
        )
    name = MODULE_NAME + ".so"
    full = _torch_flags(message, None)
    if light := headers.write_light(message):
        try:
            return _compile_and_link(message, sources, out, _torch_flags(message, light), name)
        except BuildFailed as error:
            text = str(error)
            if not headers.full_might_help(text, message, [_compiler(), *full["host"]]):
                raise
    return _compile_and_link(message, sources, out, full, name)


def _plain_flags(message: dict[str, Any]) -> dict[str, list[str]]:
    includes = [f"-I{os.path.join(message['dir'], 'src')}"]
    return {
        "host": ["-O3", "-fPIC", *includes, *message["cflags"]],
        "cuda": [
            "-O3",
            "-Xcompiler",
            "-fPIC",
            *message["arch_flags"],
            *includes,
            *message["cuda_cflags"],
        ],
        "link": message["ld_flags"],
    }


def _torch_flags(message: dict[str, Any], light: str | None) -> dict[str, list[str]]:
    import torch
    from torch.utils import cpp_extension

    on_gpu = message["device"] == "cuda"
    try:
        folders = cpp_extension.include_paths("cuda" if on_gpu else "cpu")
        libraries = cpp_extension.library_paths("cuda" if on_gpu else "cpu")
    except TypeError:  # torch < 2.6 takes a flag.
        folders, libraries = (
            cpp_extension.include_paths(on_gpu),
            cpp_extension.library_paths(on_gpu),
        )
    includes = [f"-I{light}"] if light else []
    includes += [f"-I{os.path.join(message['dir'], 'src')}"]
    includes += [f"-I{folder}" for folder in [*folders, sysconfig.get_paths()["include"]]]
    cutlass = os.environ.get("CUTLASS_DIR")
    if cutlass:
        includes += [f"-I{cutlass}/include", f"-I{cutlass}/tools/util/include"]
    standard = "-std=c++20" if torch.__version__ >= "2.10" else "-std=c++17"
    defines = [
        f"-DTORCH_EXTENSION_NAME={MODULE_NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    own = [f for f in message["cflags"] if not f.startswith("-std=")]
    own_cuda = [f for f in message["cuda_cflags"] if not f.startswith(("-std=", "--std="))]
    link = [f"-L{folder}" for folder in libraries]
    link += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    if on_gpu:
        link += ["-lc10_cuda", "-ltorch_cuda", "-lcudart"]
    return {
        "host": ["-O1" if on_gpu else "-O3", "-fPIC", standard, *defines, *includes, *own],
        # The host half of a .cu file is glue around launches: optimising it only takes time.
        "cuda": ["-Xcompiler", "-fPIC,-O0", standard, *defines, *_NVCC_TORCH_FLAGS,
                 *message["arch_flags"], *includes, *own_cuda],
        "link": [*link, *message["ld_flags"]],
    }  # fmt: skip


def _compile_and_link(
    message: dict[str, Any], sources: list[str], out: str, flags: dict[str, list[str]], name: str
) -> str:
    compiler = _compiler()
    uses_cuda = any(s.endswith(_CUDA_SUFFIX) for s in sources)
    nvcc = _nvcc() if uses_cuda else ""
    objects = [os.path.join(out, f"{i}.o") for i in range(len(sources))]

    def compile_one(pair: tuple[str, str]) -> None:
        source, target = pair
        if source.endswith(_CUDA_SUFFIX):
            _run([nvcc, *flags["cuda"], "-c", source, "-o", target], message)
        else:
            _run([compiler, *flags["host"], "-c", source, "-o", target], message)

    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, zip(sources, objects, strict=True)))
    library = os.path.join(out, name)
    if uses_cuda:
        _run([nvcc, "-shared", *objects, "-o", library, *_for_nvcc(flags["link"])], message)
    else:
        _run([compiler, "-shared", *objects, "-o", library, *flags["link"]], message)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"


def _for_nvcc(link: list[str]) -> list[str]:
    return [flag for flag in link if flag.startswith(("-L", "-l"))]


def _nvcc() -> str:
    from torch.utils.cpp_extension import CUDA_HOME

    beside = os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else ""
    path = beside if beside and os.path.exists(beside) else shutil.which("nvcc")
    if not path:
        raise BuildFailed(
            "CUDA sources need nvcc, which is not installed (or CUDA_HOME is not set)"
        )
    return path


def _run(command: list[str], message: dict[str, Any]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=message["timeout_s"],
            env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"compiling took longer than {message['timeout_s']:.0f} s") from None
    except OSError as error:
        raise BuildFailed(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        text = (done.stderr or done.stdout).replace(message["dir"] + "/src/", "")
        raise BuildFailed(text[-8000:] or f"{command[0]} exited with code {done.returncode}")
