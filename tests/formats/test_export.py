"""Export: packs keep everything on a round trip, evaluations become public traces and come back."""

from __future__ import annotations

import json

import pytest

from sol_gym.errors import ProblemError
from sol_gym.evaluation import (
    Correctness,
    Evaluation,
    Mismatch,
    Provenance,
    Status,
    Timing,
    WorkloadResult,
)
from sol_gym.formats import from_traces, read_traces, to_traces, write_traces
from sol_gym.problem import export_problem, load_problem
from sol_gym.problems import list_ids, load


def test_every_pack_survives_export_and_load(tmp_path):
    for problem_id in list_ids():
        problem = load(problem_id)
        again = load_problem(export_problem(problem, tmp_path / problem_id))
        assert again.model_dump() == problem.model_dump(), problem_id
        assert again.content_hash == problem.content_hash


def test_the_smoke_workloads_are_exported_under_another_id(tmp_path):
    smoke = load("L1/069", profile="smoke")
    again = load_problem(export_problem(smoke, tmp_path / "smoke"))
    assert again.id == "069_rms_norm"  # Not the library's, whose published times it would claim.
    assert [w.axes for w in again.workloads] == [w.axes for w in smoke.workloads]
    assert again.content_hash == smoke.content_hash


def test_what_was_written_is_the_public_layout(tmp_path):
    folder = export_problem(load("FIB/012"), tmp_path / "p")
    definition = json.loads((folder / "definition.json").read_text())
    assert definition["reference"] == (folder / "reference.py").read_text()
    assert definition["inputs"]["sm_scale"] == {"shape": None, "dtype": "float32"}
    line = json.loads((folder / "workload.jsonl").read_text().splitlines()[0])
    assert set(line) == {"uuid", "axes", "inputs", "tolerance"}
    assert line["tolerance"]["allow_negative_inf"] is True


def test_a_folder_that_cannot_be_written_is_named(make_problem, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match="file/p: cannot be written"):
        export_problem(make_problem(), tmp_path / "file" / "p")


# ---- Traces


def timing(**changes):
    data = {
        "t_k_ms": 0.5, "batch_ms": 0.5, "reported_ms": 0.4, "mode": "graph", "n_sets": 8,
        "repeats": 5, "spread": 0.01, "overhead_ms": 0.2,
    }  # fmt: skip
    return Timing.model_validate(data | changes)


def result(uuid="w0", status=Status.PASSED, **changes):
    data = {"uuid": uuid, "axes": {"rows": 5}, "status": status}
    if status is Status.PASSED:
        data |= {
            "correctness": Correctness(rounds=3, max_absolute_error=1e-3),
            "timing": timing(),
            "t_b_ms": 1.0,
            "t_sol_ms": 0.25,
            "bound_by": "memory",
            "score": 0.75,
        }
    return WorkloadResult.model_validate(data | changes)


def evaluation(problem, results, status=Status.PASSED, **changes):
    provenance = Provenance(
        device="h200", device_name="NVIDIA H200", profile="full", inputs_profile="compatible",
        problem_hash=problem.content_hash, solution_hash="ab", versions={"torch": "2.13.0"},
        date="2026-11-30T00:00:00+00:00",
    )  # fmt: skip
    data = {"problem": problem.id, "solution": "mine", "status": status, "results": results}
    return Evaluation.model_validate(data | {"provenance": provenance} | changes)


def test_a_passed_workload_states_latency_and_gain_over_the_baseline(make_problem):
    problem = make_problem()
    (trace,) = to_traces(evaluation(problem, [result()], score=0.75, log="hello"), problem)
    assert (trace["definition"], trace["solution"]) == ("scale", "mine")
    assert trace["workload"]["axes"] == {"rows": 5}
    assert trace["workload"]["inputs"]["eps"] == {"type": "scalar", "value": 0.5}
    e = trace["evaluation"]
    assert e["status"] == "PASSED"
    assert e["performance"] == {
        "latency_ms": 0.5, "reference_latency_ms": 1.0, "speedup_factor": 2.0
    }  # fmt: skip
    assert e["correctness"]["max_absolute_error"] == 1e-3
    assert e["environment"] == {"hardware": "NVIDIA H200", "libs": {"torch": "2.13.0"}}
    assert (e["timestamp"], e["log"]) == ("2026-11-30T00:00:00+00:00", "hello")


def test_correctness_and_performance_stand_where_the_schema_wants_them(make_problem):
    problem = make_problem()
    for status in Status:
        if status in (Status.PASSED, Status.BELOW_SOL, Status.INFRA_ERROR):
            continue
        wrong = result(status=status, correctness=Correctness(has_nan=True, has_inf=True))
        (trace,) = to_traces(evaluation(problem, [wrong], status), problem)
        e = trace["evaluation"]
        assert e["status"] == status.value
        assert e["performance"] is None
        assert (e["correctness"] is not None) == (status is Status.INCORRECT_NUMERICAL)
        if e["correctness"]:
            assert (e["correctness"]["has_nan"], e["correctness"]["has_inf"]) == (True, False)


def test_what_the_schema_cannot_state_is_left_out(make_problem):
    problem = make_problem()
    for status in (Status.BELOW_SOL, Status.INFRA_ERROR):
        assert to_traces(evaluation(problem, [result(status=status)], status), problem) == []
        assert to_traces(evaluation(problem, [], status), problem) == []
    untimed = result(timing=None, score=None)
    assert to_traces(evaluation(problem, [untimed]), problem) == []


def test_a_solution_that_does_not_compile_failed_on_every_workload(make_problem):
    problem = make_problem()
    failed = evaluation(problem, [], Status.COMPILE_ERROR, message="line 1", score=0.0)
    (trace,) = to_traces(failed, problem)
    assert trace["evaluation"]["status"] == "COMPILE_ERROR"
    assert trace["evaluation"]["log"] == "line 1"


def test_traces_give_the_evaluation_back(make_problem, tmp_path):
    problem = make_problem()
    mismatch = Mismatch(
        output="y", index=(1, 2), got="nan", expected=1.0, mismatched=1, total=40
    )  # fmt: skip
    wrong = result(
        status=Status.INCORRECT_NUMERICAL,
        correctness=Correctness(max_relative_error=float("inf"), mismatch=mismatch),
    )
    before = evaluation(problem, [wrong], Status.INCORRECT_NUMERICAL, score=0.0, log="x\n")
    file = tmp_path / "traces.jsonl"
    assert write_traces(before, problem, file) == 1
    assert write_traces(before, problem, file) == 1  # Appends.
    records = read_traces(file)
    assert len(records) == 2
    json.dumps(records, allow_nan=False)
    assert from_traces(records[:1]) == before


def test_traces_of_others_or_of_several_evaluations_are_refused(make_problem, tmp_path):
    problem = make_problem()
    with pytest.raises(ProblemError, match="expected traces written by sol_gym"):
        from_traces([{"definition": "d", "workload": {}}])
    both = [evaluation(problem, [result()], solution=name) for name in ("a", "b")]
    with pytest.raises(ProblemError, match="traces of 2 evaluations"):
        from_traces([t for e in both for t in to_traces(e, problem)])
    (tmp_path / "t.jsonl").write_text('{"definition": "d"}\n')
    with pytest.raises(ProblemError, match=r"t\.jsonl:1: expected a trace"):
        read_traces(tmp_path / "t.jsonl")
    with pytest.raises(ProblemError, match="cannot be read"):
        read_traces(tmp_path / "none.jsonl")


def test_an_evaluation_of_another_problem_is_refused(make_problem):
    other = make_problem(tolerance={"max_atol": 1.0})
    with pytest.raises(ProblemError, match="give the problem with the same workloads"):
        to_traces(evaluation(other, [result()]), make_problem())
