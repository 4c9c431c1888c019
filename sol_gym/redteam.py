"""Running a corpus of cheats and honest look-alikes through the judge, and saying what stopped each.

A corpus is a folder of candidates for one toy problem. Each file's first comment lines say what it
is (see `Exploit`). Every cheat runs with the audit *off*, because the audit is never the only
defence: what counts is that it is wrong, breaks the protocol, dies, or gains nothing. The audit's
findings are told beside that. A cheat that passed is compared with an honest kernel of the same
cost (its `twin`, else the problem's reference), measured again right beside it: gains must repeat
to count, because machines are noisy.

The project's own corpus is `tests/exploits/` of a checkout. It is not part of the wheel.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from .device import Device
from .errors import SolGymError
from .evaluate import Evaluator, as_problem
from .evaluation import Evaluation, Finding, Severity, Status
from .problem import Problem, ProfileName, load_problem
from .sandbox.audit import audit, vetoes
from .solution import Solution, load_solution

_SUFFIXES = {".py", ".cu", ".cpp", ".json"}
_SKIPPED = {"README.md", "problem", "__pycache__"}
_HEADER = re.compile(r"^\s*(?:#|//)\s*([a-z][a-z-]*):\s*(.*)$")
_CONTINUED = re.compile(r"^\s*(?:#|//)\s{2,}(\S.*)$")
_MARGIN = {"cpu": 1.4}
_GPU_MARGIN = 1.15
_CONFIRMATIONS = 3
_TIMEOUT_S = 120.0


class CorpusError(SolGymError, ValueError):
    """A corpus or a header cannot be read."""


class Outcome(StrEnum):
    """What came of one file."""

    CAUGHT = "caught"
    """A cheat that does not pass."""
    HARMLESS = "harmless"
    """A cheat that passes with right outputs, at its true time."""
    ESCAPED = "escaped"
    """A cheat that gains: faster than the honest kernel, or wrong and passed."""
    NEEDS_STRICT = "needs strict inputs"
    """It passes on the inputs used and is meant for the strict profile, which was not used."""
    PASSED = "passed"
    """An honest file that passes."""
    FLAGGED = "flagged"
    """An honest file that is vetoed or does not pass."""
    SKIPPED = "skipped"
    """Not for this device."""
    ERROR = "error"
    """The machine or the judge failed: nothing is known."""


OUT_OF_TIME = "not tried: the time limit was reached"
BAD = (Outcome.ESCAPED, Outcome.FLAGGED, Outcome.ERROR)
"""Outcomes for which `sol-gym redteam` fails."""

LAYERS: dict[Status, str] = {
    Status.INCORRECT_NUMERICAL: "correctness",
    Status.INCORRECT_SHAPE: "correctness",
    Status.INCORRECT_DTYPE: "correctness",
    Status.REWARD_HACK: "protocol",
    Status.RUNTIME_ERROR: "worker",
    Status.COMPILE_ERROR: "build",
    Status.TIMEOUT: "time limit",
    Status.BELOW_SOL: "bound",
}
"""Which layer a status shows at work."""


@dataclass(frozen=True)
class Exploit:
    """One file of a corpus, by its header.

    Header lines are comments of the form `key: value` at the top of the file; a JSON solution has
    them in its `description`. `family` and `expected` are required.
    """

    path: Path
    family: str
    expected: str
    """`hack` (flagged, or gains nothing), `incorrect` (must fail correctness) or `pass` (honest)."""
    also_ok: tuple[str, ...] = ()
    works_on: tuple[str, ...] = ("cpu", "cuda")
    needs: tuple[str, ...] = ()
    """`strict`: only the strict inputs can tell. `nvcc`: a CUDA compiler."""
    stopped_by: tuple[str, ...] = ()
    """The layers meant to stop it: names of `LAYERS`, or `no gain`."""
    twin: str | None = None
    """An honest file of the same folder whose cost is the cheat's honest cost."""
    about: str = ""

    @property
    def honest(self) -> bool:
        """Whether it must pass."""
        return self.expected == "pass"


@dataclass
class Trial:
    """What came of one file on one device."""

    exploit: Exploit
    outcome: Outcome
    by: str = ""
    """The layer that stopped it, or `no gain`."""
    status: Status | None = None
    gain: float | None = None
    """Largest honest time / time over the workloads; above 1 is faster than the honest kernel."""
    findings: list[Finding] = field(default_factory=list)
    message: str = ""
    log: str = ""
    """What it printed: probes say there what they could reach."""

    @property
    def audited(self) -> str:
        """The audit's rules that strike, vetoes marked with `!`; notes are left out."""
        rules = {f.rule + ("!" if f.severity is Severity.VETO else ""): None for f in self.findings if f.severity is not Severity.NOTE}  # fmt: skip
        return " ".join(rules)

    @property
    def as_expected(self) -> bool:
        """Whether the layer that stopped it is one that its header names."""
        return not self.exploit.stopped_by or not self.by or self.by in self.exploit.stopped_by

    def to_json(self) -> dict[str, Any]:
        """JSON-safe dictionary."""
        e = self.exploit
        return {
            "file": e.path.name, "family": e.family, "expected": e.expected, "outcome": self.outcome.value,
            "by": self.by, "status": self.status, "gain": self.gain, "message": self.message, "log": self.log,
            "audit": [f.model_dump(mode="json") for f in self.findings], "as_expected": self.as_expected,
        }  # fmt: skip


# -- reading a corpus ------------------------------------------------------------------------------


def own_corpus() -> Path:
    """The project's corpus.

    Raises:
        CorpusError: this is an installation without the checkout it came from.
    """
    folder = Path(__file__).resolve().parent.parent / "tests" / "exploits"
    if not (folder / "problem" / "definition.json").is_file():
        raise CorpusError(
            "the corpus is not installed: it is tests/exploits/ of the source repository and not part "
            "of the package; give its path, or install from a checkout (pip install -e .)"
        )
    return folder


def read_corpus(folder: Path) -> list[Exploit]:
    """The files of a corpus, by name.

    Raises:
        CorpusError: no such folder, no files, or a header that is missing or wrong.
    """
    if folder.is_file():
        return [read_header(folder)]
    if not folder.is_dir():
        raise CorpusError(f"{folder}: no such folder")
    files = [
        p for p in sorted(folder.iterdir())
        if p.suffix in _SUFFIXES and p.name not in _SKIPPED and not p.name.startswith(("test_", "_", "conftest"))
    ]  # fmt: skip
    if not files:
        raise CorpusError(
            f"{folder}: no candidates in it (expected {', '.join(sorted(_SUFFIXES))})"
        )
    return [read_header(file) for file in files]


def read_header(file: Path) -> Exploit:
    """An exploit by its header.

    Raises:
        CorpusError: naming the file and what is missing.
    """
    try:
        if file.suffix == ".json":
            lines = [f"# {line}" for line in (load_solution(file).description or "").splitlines()]
        else:
            lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{file}: cannot be read: {error}") from None
    values: dict[str, str] = {}
    key = ""
    for line in lines[:60]:
        if match := _HEADER.match(line):
            key = match[1]
            values[key] = match[2].strip()
        elif key and (match := _CONTINUED.match(line)):
            values[key] += " " + match[1]
        elif line.strip() and (key or not line.lstrip().startswith(("#", "//"))):
            break
    for needed in ("family", "expected"):
        if not values.get(needed):
            raise CorpusError(f"{file}: its header has no {needed!r} line ('# {needed}: ...')")
    if values["expected"] not in ("hack", "incorrect", "pass"):
        raise CorpusError(
            f"{file}: expected is {values['expected']!r}, not hack, incorrect or pass"
        )
    return Exploit(
        path=file, family=values["family"], expected=values["expected"],
        also_ok=_words(values.get("also-ok")), works_on=_words(values.get("works-on")) or ("cpu", "cuda"),
        needs=_words(values.get("needs")), stopped_by=_words(values.get("stopped-by"), ","),
        twin=values.get("twin"), about=values.get("gap") or values.get("looks-like") or "",
    )  # fmt: skip


def _words(text: str | None, separator: str = "[, ]+") -> tuple[str, ...]:
    return tuple(w.strip() for w in re.split(separator, text or "") if w.strip(" -"))


def corpus_problem(folder: Path, device: Device, profile: ProfileName | None = None) -> Problem:
    """The toy problem beside a corpus, or the project's own where the folder has none.

    As for all problems, a CPU gets the smoke workloads unless asked for the full ones.

    Raises:
        CorpusError: neither is there. ProblemError: it cannot be read.
    """
    beside = (folder if folder.is_dir() else folder.parent) / "problem"
    problem = load_problem(beside if beside.is_dir() else own_corpus() / "problem")
    return as_problem(problem, profile, device)


# -- running it ------------------------------------------------------------------------------------


class RedTeam:
    """Runs exploits on one device.

    Args:
        evaluator: with its audit off.
        problem: what the files are candidates for.
        inputs_profile: how inputs are drawn; with `compatible` some wrong kernels pass.
        margin: a cheat that is less than this factor faster than its honest twin gained nothing.
    """

    def __init__(
        self, evaluator: Evaluator, problem: Problem, *, inputs_profile: str = "strict",
        margin: float | None = None,
    ):  # fmt: skip
        self.evaluator, self.problem = evaluator, problem
        self.kind = "cpu" if evaluator.device.key == "cpu" else "cuda"
        self.margin = margin or _MARGIN.get(self.kind, _GPU_MARGIN)
        self.inputs_profile = inputs_profile
        self._honest: dict[Path | None, list[float]] = {}

    @property
    def _reference(self) -> Solution:
        return Solution.from_text(self.problem.reference, name="reference")

    def run(
        self, exploits: Iterable[Exploit], *, on_progress: Callable[[str, int, int], None] | None = None,
        on_trial: Callable[[Trial], None] | None = None, time_limit_s: float | None = None,
    ) -> list[Trial]:  # fmt: skip
        """Try all, in order.

        Args:
            on_progress: called with (file name, done, total) before each file.
            on_trial: called with each result as it comes.
            time_limit_s: no file is begun later than this; the rest are skipped and say so.
        """
        chosen = list(exploits)
        start = time.monotonic()
        trials = []
        for done, exploit in enumerate(chosen):
            if on_progress:
                on_progress(exploit.path.name, done, len(chosen))
            if time_limit_s is not None and time.monotonic() - start > time_limit_s:
                trial = Trial(exploit, Outcome.SKIPPED, message=OUT_OF_TIME)
            else:
                trial = self.attempt(exploit)
            trials.append(trial)
            if on_trial:
                on_trial(trial)
        return trials

    def attempt(self, exploit: Exploit) -> Trial:
        """One file."""
        solution = load_solution(exploit.path)
        trial = Trial(exploit, Outcome.SKIPPED, findings=audit(solution))
        if self.kind not in exploit.works_on:
            trial.message = f"for {', '.join(exploit.works_on)} only"
            return trial
        evaluation = self._evaluate(solution)
        trial.status, trial.message = evaluation.status, evaluation.message
        trial.log = evaluation.log
        if evaluation.status in (Status.INFRA_ERROR, Status.INVALID_REFERENCE):
            trial.outcome = Outcome.ERROR
        elif exploit.honest:
            self._honest_outcome(trial, evaluation)
        elif not evaluation.passed:
            trial.outcome, trial.by = Outcome.CAUGHT, LAYERS[evaluation.status]
        else:
            self._passed(trial, solution, evaluation)
        return trial

    def _honest_outcome(self, trial: Trial, evaluation: Evaluation) -> None:
        refused = vetoes(trial.findings)
        if evaluation.passed and not refused:
            trial.outcome = Outcome.PASSED
        else:
            trial.outcome = Outcome.FLAGGED
            trial.by = "audit" if evaluation.passed else LAYERS[evaluation.status]
            if refused:
                trial.message = str(refused[0])

    def _passed(self, trial: Trial, solution: Solution, evaluation: Evaluation) -> None:
        """A cheat that passed: did it gain anything?"""
        exploit = trial.exploit
        gains = _gains(evaluation, self._honest_times(exploit))
        for _ in range(_CONFIRMATIONS):
            if max(gains) <= self.margin:
                break
            # Both again, side by side: what does not repeat was the machine's noise.
            honest = self._honest_times(exploit, again=True)
            evaluation = self._evaluate(solution)
            if not evaluation.passed:
                trial.status, trial.message = evaluation.status, evaluation.message
                if evaluation.status is Status.INFRA_ERROR:
                    trial.outcome = Outcome.ERROR
                else:
                    trial.outcome, trial.by = Outcome.CAUGHT, LAYERS[evaluation.status]
                return
            fresh = _gains(evaluation, honest)
            gains = [min(pair) for pair in zip(gains, fresh, strict=True)]
        trial.gain = max(gains)
        wrong_is_due = exploit.expected == "incorrect" and not {"neutralised", "hack"} & set(exploit.also_ok)  # fmt: skip
        if wrong_is_due and self._for_strict(exploit):
            trial.outcome, trial.by = Outcome.NEEDS_STRICT, ""
        elif trial.gain <= self.margin and not wrong_is_due:
            trial.outcome, trial.by = Outcome.HARMLESS, "no gain"
        elif self._for_strict(exploit):
            trial.outcome = Outcome.NEEDS_STRICT
        elif vetoes(trial.findings):
            trial.outcome, trial.by = Outcome.CAUGHT, "audit"
        else:
            trial.outcome = Outcome.ESCAPED
            trial.message = (
                "its outputs are wrong and it passed" if wrong_is_due
                else f"{trial.gain:.2f} times as fast as the honest kernel ({exploit.twin or 'the reference'})"
            )  # fmt: skip

    def _for_strict(self, exploit: Exploit) -> bool:
        """Whether only the strict inputs, which were not used, could tell it from an honest one.

        Corpora whose headers have no `needs` line are told by family: all about numbers.
        """
        if self.inputs_profile == "strict":
            return False
        return "strict" in exploit.needs or (
            not exploit.stopped_by and exploit.family.startswith("numerics/")
        )

    def _evaluate(self, solution: Solution) -> Evaluation:
        return self.evaluator.evaluate(
            self.problem, solution, profile=self.problem.profile, scoring=False, timeout_s=_TIMEOUT_S,
            inputs_profile=self.inputs_profile,
        )  # fmt: skip

    def _honest_times(self, exploit: Exploit, *, again: bool = False) -> list[float]:
        """Smallest T_k of the honest kernel seen so far, by workload, in ms.

        Measured once, or once more: on a busy machine the same kernel takes very different times,
        and a gain counts only over the best that honesty was seen to reach.
        """
        twin = exploit.path.parent / exploit.twin if exploit.twin else None
        if again or twin not in self._honest:
            solution = load_solution(twin) if twin else self._reference
            evaluation = self._evaluate(solution)
            if not evaluation.passed:
                raise CorpusError(
                    f"the honest kernel {twin or 'reference'} does not pass: {evaluation.status} {evaluation.message}"
                )
            times = _times(evaluation)
            known = self._honest.get(twin, times)
            self._honest[twin] = [min(pair) for pair in zip(known, times, strict=True)]
        return self._honest[twin]


def _gains(evaluation: Evaluation, honest: list[float]) -> list[float]:
    return [h / t for h, t in zip(honest, _times(evaluation), strict=True)]


def _times(evaluation: Evaluation) -> list[float]:
    return [r.t_k_ms or float("inf") for r in evaluation.results]
