"""The audit of a solution: every file through its reader, findings in order of weight."""

from __future__ import annotations

from pathlib import PurePosixPath

from ...evaluation import Finding, Severity
from ...solution import Solution
from . import python, text
from .cpp import read_cpp
from .report import Report

_MOST_FINDINGS = 60
_LONGEST = 4_000_000
_ORDER = {Severity.VETO: 0, Severity.SUSPICIOUS: 1, Severity.NOTE: 2}


def audit(solution: Solution) -> list[Finding]:
    """What the rules find in a solution's sources, vetoes first. Nothing is run.

    Files that do not parse get no findings of the Python rules: a compile error is not the audit's
    to report.
    """
    found: list[Finding] = []
    for source in solution.sources:
        found += audit_text(source.content, source.path)
    found.sort(key=lambda f: (_ORDER[f.severity], f.file, f.line))
    return found[:_MOST_FINDINGS]


def audit_text(content: str, path: str) -> list[Finding]:
    """Findings of one file; its suffix tells Python (.py) from C++ and CUDA (anything else)."""
    report = Report(path, content)
    findings = report.findings
    content = content[:_LONGEST]
    is_python = PurePosixPath(path).suffix in (".py", ".pyi", ".pth")
    if is_python:
        python.check_file_name(path, report)
        try:
            inner = python.read_python(content, report)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            inner = []
        for code, line in inner:
            # Lines inside a string written in one line (with \n) all count as the string's own.
            inside = Report(path, code, line or 1)
            read_cpp(code, inside)
            findings += inside.findings
    else:
        read_cpp(content, report)
    _words(content, report)
    return findings


def _words(content: str, report: Report) -> None:
    for offset, words in text.to_reviewer(content)[:8]:
        report.add(
            "addresses-reviewer", content.count("\n", 0, offset) + 1, " ".join(words.split())
        )
    if (at := text.invisible(content)) is not None:
        report.add("invisible-text", content.count("\n", 0, at) + 1, f"U+{ord(content[at]):04X}")


def vetoes(findings: list[Finding]) -> list[Finding]:
    """Those findings for which a solution is refused."""
    return [f for f in findings if f.severity is Severity.VETO]
