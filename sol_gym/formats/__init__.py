"""Neighbours' formats: importing their problems, exporting ours and what came of judging.

One module a format (`sol_execbench`, `flashinfer_trace`, `kernelbench`), one for the audit, one
for export. See docs/formats.md.

Example:
    >>> from sol_gym.formats import import_problems
    >>> for item in import_problems("KernelBench/level1/19_ReLU.py", out="imported"):  # doctest: +SKIP
    ...     print(item.folder, item.findings)
"""

from __future__ import annotations

from .export import export_problem, from_traces, read_traces, to_traces, write_traces
from .imported import Imported, ImportFailure, ProblemFinding
from .importing import FORMATS, audit_problem, detect, import_problems

__all__ = [  # noqa: RUF022 (grouped)
    # import
    "FORMATS",
    "ProblemFinding",
    "ImportFailure",
    "Imported",
    "audit_problem",
    "detect",
    "import_problems",
    # export
    "export_problem",
    "from_traces",
    "read_traces",
    "to_traces",
    "write_traces",
]
