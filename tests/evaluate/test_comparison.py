"""Published bounds beside ours, and the causes that have to reproduce them."""

from __future__ import annotations

import csv

import pytest

from sol_gym.device import get_device
from sol_gym.errors import ProblemError
from sol_gym.evaluate.bounds import DRAWS, bound_times, least_bound, published_row
from sol_gym.evaluate.comparison import (
    Bracket,
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
        between = [r for b in cause.brackets for r in (b.low, b.high)]
        for recipe in (*cause.recipes, *between):
            assert {*recipe.omit, *recipe.whole} <= names, problem_id
        assert (cause.stated is None) == (cause.ratios is None)


@pytest.mark.parametrize(
    ("problem_id", "index", "cause"),
    [
        ("Quant/022", 2, "counts only the weight and one activation at two bytes as traffic"),
        ("Quant/031", 0, "counts only intermediates as traffic"),
        ("L2/040", 12, "counts intermediates as traffic; adds 600 cycles"),
        ("L2/021", 5, "leaves out 4194304 * batch_size"),
        ("L1/094", 0, "prices 4-byte elements at 2 bytes; counts intermediates"),
    ],
)
def test_published_figure_is_found_by_arithmetic(problem_id, index, cause):
    problem = load(problem_id)
    row = compare_one(problem, index, problem.workloads[index], B200)
    assert row.reproduced and cause in row.cause


def test_figures_with_eight_digits_are_reproduced_to_them_all():
    problem = load("Quant/022")
    recipe = next(r for r in causes()[problem.id].recipes if r.extra)
    for index in (2, 7, 15):
        workload = problem.workloads[index]
        bound = analyze(problem, workload, B200)
        published = published_row(problem, workload).t_sol_ms
        assert recipe.milliseconds(problem, workload, bound) == pytest.approx(published, rel=1e-5)


def test_bracket_says_what_is_known_and_is_checked():
    problem = load("L1/086")
    workload = problem.workloads[11]
    bound = analyze(problem, workload, B200)
    row = published_row(problem, workload)
    cause, reproduced = attribute(problem, workload, bound, row.t_sol_ms)
    assert cause.startswith("not reproduced: ") and "lies between" in cause and not reproduced
    (bracket,) = causes()[problem.id].brackets
    assert isinstance(bracket, Bracket)
    low, high = (r.milliseconds(problem, workload, bound) for r in (bracket.low, bracket.high))
    assert low < row.t_sol_ms < high
    assert attribute(problem, workload, bound, 2 * high)[0] is None
    assert attribute(problem, workload, bound, low / 2)[0] is None


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


def test_where_values_steer_the_least_bound_of_a_few_draws_counts():
    problem = load("L1/021")
    workload = problem.workloads[6]
    draws = [analyze(problem, workload, B200, seed=seed).t_sol_ms for seed in range(DRAWS)]
    assert min(draws) < max(draws)
    assert least_bound(problem, workload, B200).t_sol_ms == min(draws)
    plain = load("L1/069")
    once = analyze(plain, plain.workloads[0], B200)
    assert least_bound(plain, plain.workloads[0], B200) == once
