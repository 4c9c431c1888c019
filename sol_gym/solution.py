"""Solutions: kernel source as data. One text, or several files with an entry point.

The JSON form is the public `solution.json`. A bare text is accepted too, because that is what an
agent produces: `Solution.from_text(code)` finds the language and entry point in it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import SolutionError
from .problem import explain

Language = Literal[
    "pytorch", "triton", "cute_dsl", "cutile", "cudnn_frontend",
    "cpp", "cuda_cpp", "cutlass", "cudnn", "cublas",
]  # fmt: skip
PYTHON_LANGUAGES = {"pytorch", "triton", "cute_dsl", "cutile", "cudnn_frontend"}
_SUFFIXES_CPP = {".cu", ".cpp", ".cc", ".cxx", ".c", ".h", ".hpp", ".cuh"}
_ALIASES = {"python": "pytorch", "cuda": "cuda_cpp", "c++": "cpp"}


class SourceFile(BaseModel):
    """One file of a solution."""

    model_config = ConfigDict(frozen=True)
    path: str = Field(min_length=1)
    content: str = Field(min_length=1)

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or "\\" in path:
            raise ValueError("expected a relative path without '..'")
        return path


class CompileOptions(BaseModel):
    """Extra flags for C++ and CUDA sources; only flags on the builder's allow-list are taken."""

    model_config = ConfigDict(frozen=True, extra="allow")
    cflags: list[str] = []
    cuda_cflags: list[str] = ["-O3", "--use_fast_math"]
    ld_flags: list[str] = ["-lcuda"]


class BuildSpec(BaseModel):
    """How a solution is built and called."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    languages: list[Language] = Field(min_length=1)
    target_hardware: list[str] = ["LOCAL"]
    entry_point: str
    """`file::function`."""
    dependencies: list[str] = []
    destination_passing_style: bool | None = True
    """True: `run(*inputs, *outputs)`. False: outputs are returned. None: told from the signature."""
    binding: Literal["torch", "ctypes"] | None = None
    """C++/CUDA only. `torch`: a function taking torch::Tensor. `ctypes`: an extern "C" function
    taking raw pointers (see docs/solutions.md), which builds in seconds. None: told from the source."""
    compile_options: CompileOptions | None = None

    @field_validator("languages", mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> Any:
        return (
            [_ALIASES.get(v, v) if isinstance(v, str) else v for v in value]
            if isinstance(value, list)
            else value
        )

    @model_validator(mode="after")
    def _entry_point_fits(self) -> BuildSpec:
        if self.entry_point.count("::") != 1 or not all(self.entry_point.split("::")):
            raise ValueError(f"entry_point is {self.entry_point!r}, expected 'file::function'")
        python = {name in PYTHON_LANGUAGES for name in self.languages}
        if len(python) > 1:
            raise ValueError(f"C++ and Python languages cannot be mixed, found {self.languages}")
        suffix = PurePosixPath(self.entry_file).suffix
        if self.is_python and suffix != ".py":
            raise ValueError(
                f"languages {self.languages} need a .py entry file, found {self.entry_file!r}"
            )
        if not self.is_python and suffix not in _SUFFIXES_CPP:
            raise ValueError(
                f"languages {self.languages} need a C++/CUDA entry file, found {self.entry_file!r}"
            )
        return self

    @property
    def entry_file(self) -> str:
        """Path of the file with the entry point."""
        return self.entry_point.split("::")[0]

    @property
    def entry_function(self) -> str:
        """Name of the function to call."""
        return self.entry_point.split("::")[1]

    @property
    def is_python(self) -> bool:
        """Whether the sources are imported rather than compiled."""
        return self.languages[0] in PYTHON_LANGUAGES


class Solution(BaseModel):
    """A candidate: sources, entry point, language.

    Example:
        >>> s = Solution.from_text("import torch\\ndef run(x):\\n    return x * 2\\n")
        >>> s.spec.entry_point, s.spec.languages
        ('solution.py::run', ['pytorch'])
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    name: str = "solution"
    definition: str = ""
    """Name of the definition it is meant for; informative."""
    author: str = ""
    description: str | None = None
    spec: BuildSpec
    sources: list[SourceFile] = Field(min_length=1)

    @model_validator(mode="after")
    def _sources_fit(self) -> Solution:
        paths = [s.path for s in self.sources]
        if len(set(paths)) != len(paths):
            raise ValueError(f"sources have duplicate paths: {sorted(paths)}")
        if self.spec.entry_file not in paths:
            raise ValueError(
                f"entry file {self.spec.entry_file!r} is not among the sources {paths}"
            )
        return self

    @cached_property
    def content_hash(self) -> str:
        """Identity of what is built and run: 16 hex digits over spec and sources."""
        data = {
            "spec": self.spec.model_dump(mode="json"),
            "sources": sorted((s.path, s.content) for s in self.sources),
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def source_text(self) -> str:
        """All files as one text, for people and prompts."""
        if len(self.sources) == 1:
            return self.sources[0].content
        return "\n\n".join(f"# ---- {s.path}\n{s.content}" for s in self.sources)

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        name: str = "solution",
        language: Language | None = None,
        entry_function: str = "run",
    ) -> Solution:
        """A solution from one source text.

        The language is told from the text unless given: Python if it parses as Python, CUDA if it
        has kernels or CUDA headers, else C++. The calling convention is told from the signature.

        Raises:
            SolutionError: the text is empty.
        """
        if not isinstance(text, str) or not text.strip():
            raise SolutionError(
                "the solution text is empty; expected source code that defines run()"
            )
        text = strip_code_fence(text)
        if language is None:
            language = _guess_language(text)
        suffix = {
            "cuda_cpp": ".cu",
            "cutlass": ".cu",
            "cudnn": ".cu",
            "cublas": ".cu",
            "cpp": ".cpp",
        }.get(language, ".py")
        file = f"solution{suffix}"
        try:
            return cls(
                name=name,
                spec=BuildSpec(
                    languages=[language],
                    entry_point=f"{file}::{entry_function}",
                    destination_passing_style=None,
                ),
                sources=[SourceFile(path=file, content=text)],
            )
        except ValidationError as error:
            raise SolutionError(explain(error)) from None


def strip_code_fence(text: str) -> str:
    """The code inside a Markdown fence if the whole text is one (as language models answer)."""
    match = re.fullmatch(r"\s*```[\w+-]*\n(.*?)\n?```\s*", text, re.DOTALL)
    return match.group(1) + "\n" if match else text


def _guess_language(text: str) -> Language:
    if re.search(r"__global__|#include\s*<cuda|cudaStream_t|#include\s*<ATen/cuda", text):
        try:  # A Python file may hold CUDA source in a string.
            ast.parse(text)
        except (SyntaxError, ValueError):
            return "cuda_cpp"
    if re.search(r"^\s*#include\b", text, re.MULTILINE) and "import torch" not in text:
        return "cpp"
    return "triton" if re.search(r"^\s*(import|from)\s+triton\b", text, re.MULTILINE) else "pytorch"


def load_solution(path: str | Path) -> Solution:
    """Read a solution from a `solution.json`, or from one source file (.py, .cu, .cpp).

    Source files whose `content` is missing in the JSON are read from beside it.

    Raises:
        SolutionError: naming the file, the field, what was expected and what was found.
    """
    file = Path(path)
    if file.is_dir():
        candidates = sorted(file.glob("solution*.json"))
        if len(candidates) != 1:
            raise SolutionError(
                f"{file}: expected one solution*.json, found {[c.name for c in candidates]}"
            )
        file = candidates[0]
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SolutionError(f"{file}: cannot be read: {error}") from None
    if file.suffix != ".json":
        language: Language | None = {
            ".cu": "cuda_cpp",
            ".cpp": "cpp",
            ".cc": "cpp",
            ".cxx": "cpp",
        }.get(file.suffix)  # type: ignore[assignment]
        return Solution.from_text(text, name=file.stem, language=language)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SolutionError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise SolutionError(f"{file}: expected an object, found {type(data).__name__}")
    for source in data.get("sources") or ():
        if isinstance(source, dict) and "path" in source and not source.get("content"):
            beside = file.parent / str(source["path"])
            if not beside.is_file():
                raise SolutionError(
                    f"{file}: source {source['path']!r} has no content and {beside} does not exist"
                )
            source["content"] = beside.read_text()
    try:
        return Solution.model_validate(data)
    except ValidationError as error:
        raise SolutionError(f"{file}: {explain(error)}") from None
