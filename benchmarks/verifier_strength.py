"""How many wrong kernels the judge's comparison rejects, and how many right ones it does not.

For every problem, on its smoke workloads: mutants of the reference (see `mutants.py`) must be
rejected and honest reformulations accepted, with compatible inputs and published tolerances alone
and with strict inputs on top. The judge's own comparison runs in process; no worker is needed for
code that this file made itself.

    python benchmarks/verifier_strength.py --only L1/069 L1/013
    python benchmarks/verifier_strength.py --json strength.json

A mutant is *equivalent* if in float64 it gives the reference's outputs on every set drawn here,
strict, compatible and wild (inputs of any scale, numbers changed); it is *below rounding* if it
differs, but on no such set by as much as the judge could tell from rounding. Rates are over the
others. `--survivors` lists what got through, `--ratios` the error of honest reformulations in units
of the reference's own, which is where the factors of `sol_gym.sandbox.precision` come from.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from mutants import Version, mutants, reformulations

from sol_gym.inputs import InputMaker
from sol_gym.problem import Problem, Workload
from sol_gym.problems import list_ids, load
from sol_gym.sandbox.correctness import HARD_CAP, Comparison
from sol_gym.sandbox.oracle import OracleUnsupported, oracle_outputs
from sol_gym.sandbox.precision import Yardstick
from sol_gym.sandbox.reference import InvalidReference, Reference

_RUN_S = 10
_EQUAL = 1e-9


@dataclass
class Draw:
    """One input set, with what outputs on it are compared with."""

    workload: Workload
    kind: str
    arguments: list[Any]
    expected: list[torch.Tensor]
    yardstick: Yardstick | None


@dataclass
class Report:
    """What came of one problem."""

    problem: str
    mutants: int = 0
    killed: dict[str, int] = field(default_factory=lambda: {"compatible": 0, "strict": 0})
    equivalent: int = 0
    below_rounding: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    honest: int = 0
    rejected: dict[str, list[str]] = field(default_factory=lambda: {"compatible": [], "strict": []})
    ratios: list[tuple[str, str, str, float, float, float, float]] = field(default_factory=list)
    """(reformulation, draw, output, rms, largest, the reference's largest, shared by rows), in units
    of the noise; the last is -1 where it is not judged."""
    void: list[str] = field(default_factory=list)
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def counted(self) -> int:
        """Mutants that a judge can tell from the reference."""
        return self.mutants - self.equivalent - len(self.below_rounding)


class Study:
    """All of one problem.

    Args:
        problem: with its smoke workloads.
        seed: of all draws and choices.
        most: how many mutants at most, chosen at random.
        workloads: how many of the workloads.
        kinds: of mutants; all if empty.
    """

    def __init__(
        self, problem: Problem, seed: int, most: int, workloads: int, kinds: Sequence[str] = ()
    ):  # fmt: skip
        self.problem, self.most, self.kinds = problem, most, kinds
        self.reference = Reference(problem)
        self.random = random.Random(f"{problem.id} {seed}")
        self.report = Report(problem.id)
        self.draws: list[Draw] = []
        self.wild: list[Draw] = []
        for number, workload in enumerate(problem.workloads[:workloads]):
            maker = InputMaker(problem, workload, "cpu", seed=seed + number, profile="strict")
            for kind in (None, None, *maker.variants):
                self._add(workload, kind, list(maker.draw(kind).values()), self.draws)
            for _ in range(2):
                self._add(workload, "wild", self._wild(maker), self.wild)
        if not any(d.yardstick for d in self.draws):
            self.report.void.append("NO strict set can be judged by")

    def _add(self, workload: Workload, kind: str | None, arguments: list[Any], into: list[Draw]) -> None:  # fmt: skip
        outputs = self.problem.outputs(workload)
        yardstick = None
        name = kind or "compatible"
        try:
            expected = self.reference(arguments, outputs)
            if kind is not None:
                yardstick = Yardstick(self.problem, self.reference, arguments, outputs)
        except (InvalidReference, OracleUnsupported) as error:
            if kind != "wild":
                self.report.void.append(f"{name}: {error}")
            return
        if yardstick is not None and yardstick.void:
            if kind != "wild":
                self.report.void.append(f"{name}: {yardstick.void}")
            return
        into.append(Draw(workload, name, arguments, expected, yardstick))

    def _wild(self, maker: InputMaker) -> list[Any]:
        """A set that keeps indices, masks and signs, and nothing else."""
        values = []
        for name, value in maker.draw().items():
            if isinstance(value, float):
                tiny = 0 < value < 1e-3
                value = 10 ** self.random.uniform(-6, -1) if tiny else value * self.random.uniform(0.5, 2)  # fmt: skip
            elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1 and "mask" not in name:  # fmt: skip
                rows = torch.exp2(torch.empty((*value.shape[:-1], 1)).uniform_(-6, 6))
                drawn = torch.randn(value.shape) * (rows if value.dim() > 1 else 1)
                positive = value.numel() and float(value.min()) >= 0 and float(value.max()) != 0
                bounded = positive and float(value.max()) <= 1 and value.dim() > 1
                value = (drawn.sigmoid() if bounded else drawn.abs() if positive else drawn).to(value.dtype)  # fmt: skip
            values.append(value)
        return values

    # -- verdicts ------------------------------------------------------------------------------

    def rejected(self, version: Version, strict: bool, draws: list[Draw] | None = None) -> str:
        """Why a version is rejected; empty if it passes."""
        for draw in self.draws if draws is None else draws:
            if draw.yardstick is not None and not strict:
                continue
            outputs = self.problem.outputs(draw.workload)
            try:
                with _within(_RUN_S):
                    results = version.run([_copy(a) for a in draw.arguments], outputs)
            except Exception as error:
                return f"{draw.kind}: {type(error).__name__}"
            if len(results) != len(outputs):
                return "number of outputs"
            if draw.yardstick is None:
                capped = strict and not (self.problem.pack and self.problem.pack.selects)
                comparison = Comparison(draw.workload.tolerance, HARD_CAP if capped else None)
                for name, got, right in zip(outputs, results, draw.expected, strict=True):
                    comparison.add(name, got, right)
                if comparison.failed:
                    return f"{draw.kind}: {comparison.reasons[0]}"
            else:
                for position, got in enumerate(results):
                    if faults := draw.yardstick.faults(position, got):
                        return f"{draw.kind}: {faults[0]}"
        return ""

    def equivalent(self, version: Version) -> bool:
        """Whether a version's float64 outputs are the reference's on every set."""
        if version.source is None and version.change is None:
            return self._bitwise(version)
        reference = self.reference
        if version.source is not None:
            changed = self.problem.definition.model_copy(update={"reference": version.source})
            reference = Reference(self.problem.model_copy(update={"definition": changed}))
        for draw in [*self.draws, *self.wild]:
            outputs = self.problem.outputs(draw.workload)
            arguments = [_copy(a) for a in draw.arguments]
            try:
                right = oracle_outputs(self.reference, arguments, outputs)
                given = version.change(arguments) if version.change else arguments
                got = oracle_outputs(reference, given, outputs)
            except Exception:
                return False
            for a, b in zip(got, right, strict=True):
                a, b = a.double(), b.double()
                finite = torch.isfinite(a) & torch.isfinite(b)
                if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)):
                    return False
                if not a[finite].numel():
                    continue
                scale = float(b[finite].abs().max())
                if float((a - b)[finite].abs().max()) > _EQUAL * scale + 1e-300:
                    return False
        return True

    def _bitwise(self, version: Version) -> bool:
        for draw in [*self.draws, *self.wild]:
            outputs = self.problem.outputs(draw.workload)
            try:
                results = version.run([_copy(a) for a in draw.arguments], outputs)
            except Exception:
                return False
            if not all(torch.equal(a, b) for a, b in zip(results, draw.expected, strict=True)):
                return False
        return True

    # -- the study -----------------------------------------------------------------------------

    def __call__(self) -> Report:
        begin = time.perf_counter()
        workload = self.problem.workloads[0]
        found = list(mutants(self.problem, workload, self.reference))
        found = [v for v in found if not self.kinds or v.kind in self.kinds]
        self.random.shuffle(found)
        for version in found[: self.most]:
            self._mutant(version)
        for version in reformulations(self.problem, self.reference):
            self._honest(version)
        self.report.seconds = time.perf_counter() - begin
        return self.report

    def _mutant(self, version: Version) -> None:
        report = self.report
        compatible = self.rejected(version, strict=False)
        if compatible and ": " in compatible and compatible.split(": ", 1)[1] in _NOT_RUNNING:
            return  # It does not run at all: no fault that could be overlooked.
        report.mutants += 1
        report.kinds[version.kind] += 1
        strict = compatible or self.rejected(version, strict=True)
        if strict:
            report.killed["compatible"] += bool(compatible)
            report.killed["strict"] += 1
        elif self.equivalent(version):
            report.equivalent += 1
        else:
            name = f"{version.kind}: {version.name}"
            if self.rejected(version, strict=True, draws=self.wild):
                report.survivors.append(name)
            else:
                report.below_rounding.append(name)

    def _honest(self, version: Version) -> None:
        report = self.report
        report.honest += 1
        for profile in ("compatible", "strict"):
            only = [d for d in self.draws if (d.yardstick is not None) == (profile == "strict")]
            if reason := self.rejected(version, strict=True, draws=only):
                report.rejected[profile].append(f"{version.name}: {reason}")
        for draw in self.draws:
            if draw.yardstick is None:
                continue
            outputs = self.problem.outputs(draw.workload)
            try:
                results = version.run([_copy(a) for a in draw.arguments], outputs)
            except Exception:
                continue
            for position, (spec, got) in enumerate(zip(outputs.values(), results, strict=True)):  # fmt: skip
                noise = draw.yardstick._noise[position]
                off = draw.yardstick.compare(position, got)
                shared = off.shared if noise.systematic else -1.0
                report.ratios.append((version.name, f"{draw.kind} {noise.kind}", spec.name, off.rms, off.worst, noise.worst, shared))  # fmt: skip


_NOT_RUNNING = {"InvalidReference"}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    """A mutant that runs away is stopped."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="ids or prefixes of them")
    parser.add_argument("--subset", action="store_true", help="every tenth problem")
    parser.add_argument("--most", type=int, default=60, help="mutants a problem, at random")
    parser.add_argument("--kinds", nargs="*", default=[], help="of mutants, e.g. statistic")
    parser.add_argument("--workloads", type=int, default=2, help="smoke workloads a problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the reports there")
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--ratios", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    ids = [i for i in list_ids() if not options.only or any(i.startswith(o) for o in options.only)]
    reports = []
    head = f"{'problem':44} {'mutants':>7} {'equiv':>5} {'below':>5} {'compat':>7} {'strict':>7}  false alarms"
    print(head)
    for problem_id in ids[::10] if options.subset else ids:
        problem = load(problem_id, profile="smoke")
        report = Study(problem, options.seed, options.most, options.workloads, options.kinds)()
        reports.append(report)
        print(_line(report), flush=True)
        for text in report.void:
            print(f"    void: {text}")
        for profile, rejected in report.rejected.items():
            for text in rejected:
                print(f"    false alarm ({profile}): {text[:200]}")
        if options.survivors:
            for text in report.survivors:
                print(f"    survivor: {text}")
            for text in report.below_rounding:
                print(f"    below rounding: {text}")
        if options.json:  # After every problem, so that a run that is broken off is of use.
            options.json.write_text(json.dumps([vars(r) for r in reports], default=str))
    _summary(reports, options.ratios)


def _line(r: Report) -> str:
    def rate(killed: int) -> str:
        return f"{100 * killed / r.counted:6.1f}%" if r.counted else "      -"

    alarms = f"{len(r.rejected['compatible'])}+{len(r.rejected['strict'])} of {r.honest}"
    return (
        f"{r.problem[:44]:44} {r.mutants:7} {r.equivalent:5} {len(r.below_rounding):5} "
        f"{rate(r.killed['compatible'])} {rate(r.killed['strict'])}  {alarms}"
    )


def _summary(reports: list[Report], ratios: bool) -> None:
    counted = sum(r.counted for r in reports)
    seconds = sum(r.seconds for r in reports)
    print(f"\n{len(reports)} problems, {sum(r.mutants for r in reports)} mutants, {counted} counted, {seconds:.0f} s")  # fmt: skip
    for profile in ("compatible", "strict"):
        killed = sum(r.killed[profile] for r in reports)
        alarms = sum(len(r.rejected[profile]) for r in reports)
        honest = sum(r.honest for r in reports)
        print(f"{profile:10}: {killed} killed ({100 * killed / max(counted, 1):.2f} %), {alarms} of {honest} honest ones rejected")  # fmt: skip
    if ratios:
        for kind in ("coarse", "fine"):
            rows = [x for r in reports for x in r.ratios if x[1].endswith(kind)]
            for what, of in (("rms", 3), ("largest", 4), ("shared by rows", 6)):
                values = sorted(x[of] for x in rows if x[of] >= 0)
                if values:
                    marks = {q: values[min(len(values) - 1, int(q * len(values)))] for q in (0.5, 0.9, 0.99, 0.999, 1)}  # fmt: skip
                    print(f"{kind} {what}: " + ", ".join(f"{q:g}: {v:.3g}" for q, v in marks.items()))  # fmt: skip


if __name__ == "__main__":
    main()
