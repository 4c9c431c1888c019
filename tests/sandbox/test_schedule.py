"""Which strict sets are due, and what time does to the others."""

from __future__ import annotations

import pytest

from sol_gym.sandbox import schedule
from sol_gym.sandbox.schedule import Schedule

VARIANTS = ("plain", "rows", "tiny", "huge")


def run(workloads: int, seconds: float, void: set[str] = frozenset()) -> list[list[str]]:
    """The variants that are compared on each workload if each set takes so long."""
    plan = Schedule(VARIANTS, workloads)
    compared = []
    for index in range(workloads):
        turn = plan.turn(index)
        assert sorted(turn.variants) == sorted(VARIANTS)
        compared.append([])
        for variant in turn.variants:
            if turn.admits(variant):
                turn.record(variant, seconds, variant not in void)
                if variant not in void:
                    compared[-1].append(variant)
    return compared


@pytest.mark.parametrize("workloads", [1, 3, 14])
def test_every_variant_is_compared_on_every_workload_while_sets_take_milliseconds(workloads):
    assert all(sorted(row) == sorted(VARIANTS) for row in run(workloads, 0.005))


@pytest.mark.parametrize("workloads", [1, 2, 3, 4, 5, 16])
def test_every_variant_is_compared_at_least_once_however_slow(workloads):
    compared = run(workloads, 2.0 / workloads)
    assert {variant for row in compared for variant in row} == set(VARIANTS)
    assert all(compared)


def test_slow_sets_are_compared_once_a_workload():
    assert [len(row) for row in run(8, 1.5)] == [1] * 8


def test_what_is_due_differs_between_evaluations():
    first = {tuple(row[0] for row in run(4, 1.5)) for _ in range(20)}
    assert len(first) > 1


def test_a_seed_repeats_what_is_chosen_and_compatible_sets_lie_among_strict_ones():
    def chosen(seed):
        plan = Schedule(VARIANTS, 4, seed)
        return [plan.turn(index).rounds(2) for index in range(4)]

    assert chosen(5) == chosen(5) != chosen(6)
    assert all(len(kinds) == 6 and kinds.count(None) == 2 for kinds in chosen(5))
    assert len({kinds.index(None) for seed in range(10) for kinds in chosen(seed)}) > 1


def test_a_workload_whose_due_variant_says_nothing_gets_another_one():
    compared = run(2, 3.0, void={"plain", "rows", "tiny"})
    assert compared == [["huge"], ["huge"]]


def test_a_workload_without_a_float64_run_admits_nothing_more_and_says_why():
    plan = Schedule(VARIANTS, 2)
    turn = plan.turn(0)
    turn.forgo("no memory")
    assert not any(map(turn.admits, VARIANTS)) and turn.why_not == "no memory"
    assert all(map(plan.turn(1).admits, VARIANTS))


def test_a_float64_run_that_takes_longer_than_all_else_is_left_out_mostly(monkeypatch):
    monkeypatch.setattr(schedule, "_DUE_CHANCE", 0.0)
    assert [len(row) for row in run(6, 8.0)] == [1, 1, 1, 0, 0, 0]


def test_time_is_a_share_of_what_everything_else_takes(monkeypatch):
    plan = Schedule(VARIANTS, 4)
    assert plan.has_time(0, 0.3) and not plan.has_time(0, 0.5)
    plan._begin -= 10
    assert plan.has_time(0, 4.0) and not plan.has_time(0, 6.0)
    plan.spent_s += 4.0
    assert not plan.has_time(3, 0.5)


def test_without_variants_nothing_is_due():
    assert Schedule((), 3).turn(0).variants == ()


@pytest.mark.parametrize("workloads", [1, 5])
def test_a_timed_call_is_compared_on_one_workload_however_slow(workloads):
    plan = Schedule(VARIANTS, workloads)
    chosen = []
    for index in range(workloads):
        turn = plan.turn(index)
        turn.record(turn.variants[0], 3.0, True)
        chosen.append(turn.timed)
    assert [i for i, timed in enumerate(chosen) if timed] == [plan.timed_on]
