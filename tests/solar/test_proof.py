"""The proof of a bound adds up, and what it says is read can be felt."""

from __future__ import annotations

import pytest

from sol_gym.device import get_device
from sol_gym.errors import BoundError
from sol_gym.problems import load
from sol_gym.solar import analyze
from sol_gym.solar.proof import feel, prove

H200 = get_device("h200")
BF16, F32 = "bfloat16", "float32"


@pytest.mark.parametrize(
    "problem_id", ["L1/015", "L1/033", "L1/040", "L1/042", "L1/089", "L2/038", "Quant/006"]
)
def test_proof_adds_up_to_the_bound(problem_id):
    problem = load(problem_id, profile="smoke")
    workload = problem.workloads[0]
    bound = analyze(problem, workload, H200)
    proof = bound.proof(problem, H200)
    assert proof.bound == bound and proof.check() == []
    assert sum(m.moved_bytes for m in proof.moved) == bound.total_bytes
    assert [r.name for r in proof.roofs if r.binds] == [bound.bound_by]


def test_proof_that_does_not_add_up_says_where():
    problem = load("L1/033", profile="smoke")
    proof = prove(problem, problem.workloads[0], H200)
    first = proof.moved[0]
    forged = proof.model_copy(
        update={"moved": (first.model_copy(update={"moved_bytes": 1}), *proof.moved[1:])}
    )
    faults = forged.check()
    assert any(first.tensor in fault for fault in faults)
    assert any(fault.startswith("all bytes") for fault in faults)
    slow = proof.bound.model_copy(update={"t_sol_ms": 2 * proof.bound.t_sol_ms})
    assert any("T_SOL" in f for f in proof.model_copy(update={"bound": slow}).check())


def test_proof_reads_as_arithmetic_with_its_rules(make_problem):
    n = 256
    problem = make_problem(
        "def run(a, b, unused): return a @ b",
        {"a": ([n, n], BF16), "b": ([n, n], BF16), "unused": ([n], BF16)},
        {"y": ([n, n], BF16)},
    )
    text = str(prove(problem, problem.workloads[0], H200))
    assert (
        "reads a: 65,536 x 2 = 131,072 bytes; all; used by mm (line 3) [table.TABLE['mm']]" in text
    )
    assert "reads unused: 0 x 2 = 0 bytes; no output depends on its elements" in text
    assert "line 3: mm [256, 256] x [256, 256]: 33,554,432 of 33,554,432 FLOP on bf16_tc" in text
    assert "memory: 393,216 / 4.8e+12 a second = 8.192e-05 ms <- binds" in text


def test_proof_of_another_problem_or_device_is_refused():
    problem = load("L1/033", profile="smoke")
    bound = analyze(problem, problem.workloads[0], H200)
    with pytest.raises(BoundError, match="give the problem, device and seed"):
        bound.proof(problem, get_device("b200"))
    with pytest.raises(BoundError, match=r"this bound is of L1/033.*which L1/069"):
        bound.proof(load("L1/069", profile="smoke"), H200)


@pytest.mark.parametrize("problem_id", ["L1/015", "L1/033", "L1/069", "Quant/006"])
def test_every_element_said_to_be_read_changes_an_output(problem_id):
    problem = load(problem_id, profile="smoke")
    found = feel(problem, problem.workloads[0], elements=4)
    assert found and all(f.tried == f.changed > 0 for f in found)


def test_feeling_finds_what_is_not_read(make_problem, monkeypatch):
    from sol_gym.solar import work
    from sol_gym.solar.region import Region

    problem = make_problem(
        "def run(x, w): return x[:4] @ w", {"x": ([8, 8], F32), "w": ([8, 8], F32)},
        {"y": ([4, 8], F32)},
    )  # fmt: skip
    assert all(f.tried == f.changed for f in feel(problem, problem.workloads[0], elements=32))
    # A rule that asks for too much: all of x, not only the rows that are multiplied.
    right = work.product

    def greedy(facts, node, demand):
        found, amount = right(facts, node, demand)
        root = node.args["self"].root
        return [(root, Region.full(root.shape)), *found], amount

    monkeypatch.setattr(work, "product", greedy)
    felt = {f.tensor: f for f in feel(problem, problem.workloads[0], elements=64)}
    assert felt["x"].tried == 64 and felt["x"].changed == 32


def test_large_workloads_are_not_felt():
    problem = load("L1/033")
    with pytest.raises(BoundError, match="too many to run again"):
        feel(problem, problem.workloads[0])
