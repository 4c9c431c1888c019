"""The mutant generator and the study of one problem (benchmarks/), in process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sol_gym.problems import load
from sol_gym.sandbox.reference import Reference

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def module(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module")
def mutants():
    return module("mutants")


@pytest.fixture(scope="module")
def strength(mutants):
    return module("verifier_strength")


@pytest.fixture(scope="module")
def study(strength):
    return strength.Study(load("L1/069", profile="smoke"), seed=0, most=12, workloads=1)


def test_source_mutants_differ_from_the_reference_in_one_place_each(mutants):
    problem = load("L1/015", profile="smoke")
    found = list(mutants.source_mutants(problem))
    kinds = {kind for kind, _, _ in found}
    assert {"operand", "sign", "step", "heads", "constant", "off by one"} - kinds <= {"constant"}
    assert len({source for _, _, source in found}) > 0.9 * len(found)
    for _, _, source in found:
        compile(source, "mutant", "exec")


def test_the_generator_of_inputs_is_not_mutated(mutants):
    problem = load("L1/018", profile="smoke")
    tail = problem.reference[problem.reference.index("def generate_inputs") :]
    line = problem.reference[: -len(tail)].count("\n") + 1
    for _, what, _ in mutants.source_mutants(problem):
        assert int(what.split(":")[0].removeprefix("line ")) < line


def test_strict_sets_kill_what_compatible_ones_hide_and_reject_nothing_honest(study):
    report = study()
    assert report.mutants >= 10 and report.survivors == []
    assert report.killed["strict"] == report.counted >= report.killed["compatible"]
    assert report.honest >= 6 and report.rejected == {"compatible": [], "strict": []}


def test_an_equivalent_mutant_is_told_from_one_that_is_not(mutants, study):
    problem = study.problem

    def version(old, new):
        source = problem.reference.replace(old, new)
        assert source != problem.reference
        definition = problem.definition.model_copy(update={"reference": source})
        changed = Reference(problem.model_copy(update={"definition": definition}))
        return mutants.Version("test", new, changed, source=source)

    assert study.equivalent(version("x32.square()", "(x32 * x32)"))
    assert not study.equivalent(version("x32.square()", "(x32 * x32.abs())"))
