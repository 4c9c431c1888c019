"""Collecting findings of one file: one a rule and line, and not more than a reader wants to see."""

from __future__ import annotations

from ...evaluation import Finding, Severity
from .rules import RULES

_MOST_PER_RULE = 5
_SOURCE_CHARS = 160


class Report:
    """Findings of one file.

    Args:
        file: its path within the solution.
        text: its source, from which the lines are quoted.
        first_line: line of the file at which `text` starts (a source inside a string).
    """

    def __init__(self, file: str, text: str, first_line: int = 1):
        self.file = file
        self._lines = text.splitlines()
        self._first_line = first_line
        self._seen: set[tuple[str, int]] = set()
        self._count: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.notes_only: list[tuple[int, int]] = []
        """Line ranges that never run in a worker: what is found there is a note."""

    def add(
        self, rule_id: str, line: int, what: str = "", *, severity: Severity | None = None
    ) -> None:
        """Report a rule at a line of the text; `what` names what was seen."""
        rule = RULES[rule_id]
        if (rule_id, line) in self._seen or self._count.get(rule_id, 0) >= _MOST_PER_RULE:
            return
        self._seen.add((rule_id, line))
        self._count[rule_id] = self._count.get(rule_id, 0) + 1
        severity = severity or rule.severity
        text = f"{what}: {rule.why}" if what else rule.why
        if any(first <= line <= last for first, last in self.notes_only):
            severity = Severity.NOTE
            text += " (Only where the file is run as a script, which the judge does not do.)"
        quoted = self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""
        if len(quoted) > _SOURCE_CHARS:
            quoted = quoted[: _SOURCE_CHARS - 3] + "..."
        at = line + self._first_line - 1 if line else 0
        self.findings.append(
            Finding(rule=rule_id, severity=severity, file=self.file, line=at, text=text, source=quoted)
        )  # fmt: skip

    def has(self, rule_id: str) -> bool:
        """Whether a rule was reported."""
        return rule_id in self._count
