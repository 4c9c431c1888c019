"""Published bounds beside ours, and the causes that have to reproduce them."""

from __future__ import annotations

import csv

import pytest

from sol_gym.device import get_device
from sol_gym.errors import ProblemError
from sol_gym.evaluate.bounds import bound_times, published_row
from sol_gym.evaluate.comparison import (
    Recipe,
    agrees,
    attribute,
    causes,
    compare,
    compare_one,
    summarize,
    write_csv,
)  # fmt: skip
from sol_gym.problems import list_ids, load
from sol_gym.solar import analyze

B200 = get_device("b200-1500")


def test_both_bound_sets_can_be_had_for_a_b200():
    problem = load("L1/069").with_workloads([3, 0])
    ours, theirs = (bound_times(problem, B200, s) for s in ("solar", "published"))
    rows = [published_row(problem, w) for w in problem.workloads]
    assert [t.t_sol_ms for t in theirs] == [r.t_sol_ms for r in rows]
    assert ours[0].bound_by == "memory" and theirs[0].bound_by == "published"


@pytest.mark.parametrize(("profile", "device"), [("smoke", "b200"), ("full", "h200")])
def test_published_bounds_hold_for_full_workloads_on_a_b200_only(profile, device):
    with pytest.raises(ProblemError, match="no published bounds"):
        bound_times(load("L1/069", profile=profile), get_device(device), "published")


def test_unknown_set_is_named():
    with pytest.raises(ProblemError, match="'other'"):
        bound_times(load("L1/069"), B200, "other")


def test_recipe_is_arithmetic_over_the_same_tensors():
    problem = load("L1/033")
    workload = problem.workloads[0]
    bound = analyze(problem, workload, B200)
    row = published_row(problem, workload)
    assert not agrees(bound.t_sol_ms, row.t_sol_ms)
    without = Recipe(omit=("sublayer_output",), constant=True)
    assert agrees(without.milliseconds(problem, workload, bound), row.t_sol_ms)
    left = bound.total_bytes - bound.read_bytes["sublayer_output"]
    expected = left / 7.6674e9 + 4e-4
    assert without.milliseconds(problem, workload, bound) == pytest.approx(expected)


def test_cause_counts_only_where_it_reproduces_the_figure():
    problem = load("L1/033")
    workload = problem.workloads[0]
    bound = analyze(problem, workload, B200)
    row = published_row(problem, workload)
    cause, reproduced = attribute(problem, workload, bound, row.t_sol_ms)
    assert reproduced and "out of the bytes" in cause
    assert attribute(problem, workload, bound, 3 * row.t_sol_ms) == (None, False)
    assert attribute(problem, workload, bound, bound.t_sol_ms) == ("", False)


def test_every_entry_names_a_problem_and_tensors_that_exist():
    known = set(list_ids())
    for problem_id, cause in causes().items():
        assert problem_id in known
        definition = load(problem_id).definition
        names = {*definition.inputs, *definition.outputs}
        for recipe in cause.recipes:
            assert {*recipe.omit, *recipe.whole} <= names, problem_id
        assert (cause.stated is None) == (cause.ratios is None)


def test_comparison_as_a_table(tmp_path):
    rows = list(compare(["L1/033_post_norm_residual"], B200))
    summary = summarize(rows)
    assert summary.compared == len(rows) == 16 and not summary.unexplained
    file = tmp_path / "out.csv"
    write_csv(rows, file)
    lines = list(csv.DictReader(file.open()))
    assert [float(x["ours_ms"]) for x in lines] == [r.t_sol_ms for r in rows]
    assert sum(summary.causes.values()) == summary.compared - summary.narrow


def test_deviation_without_a_cause_is_found():
    problem = load("L1/033")
    row = compare_one(problem, 0, problem.workloads[0], B200)
    lost = row.model_copy(update={"cause": None})
    assert summarize([lost]).unexplained == (lost,)
    assert row.reproduced
