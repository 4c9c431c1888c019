import pytest

from sol_gym.sandbox.timing import (
    Calibration,
    Measured,
    Plan,
    SingleRound,
    sets_for,
    singles_would_count,
    timing_from,
)

PLAN = Plan()


def measured(judge, own, n=100, singles=(), tail=0.0):
    rounds = [SingleRound(list(singles), tail)] if singles else []
    return Measured(n_sets=n, mode="graph", judge_s=judge, reported_s=own, rounds=rounds)


def test_an_honest_time_is_the_workers_own():
    timing = timing_from(
        measured([0.0103] * 5, [0.010] * 5), Calibration(overhead_s=0.0003), PLAN, 0.01
    )
    assert timing.t_k_ms == pytest.approx(0.1)
    assert timing.marks == []


def test_a_lie_gains_no_more_than_the_overhead():
    timing = timing_from(
        measured([0.0103] * 5, [0.0] * 5), Calibration(overhead_s=0.0004), PLAN, 0.01
    )
    assert timing.t_k_ms == pytest.approx((10.3 - 0.4) / 100)
    assert any("disagree" in mark for mark in timing.marks)


def test_single_requests_expose_work_moved_between_calls():
    singles = [25e-6] * 40
    timing = timing_from(
        measured([0.0005] * 5, [0.0002] * 5, singles=singles),
        Calibration(0.0003, 10e-6, 0.0003, 10e-6),
        PLAN,
        0.01,
    )
    assert timing.t_k_ms == pytest.approx(15e-3 - 0.5e-3)
    assert any("single calls" in mark for mark in timing.marks)


def test_honest_single_requests_raise_nothing():
    singles = [13e-6] * 40
    timing = timing_from(
        measured([0.0006] * 5, [0.0003] * 5, singles=singles),
        Calibration(0.0003, 10.2e-6, 0.0003, 10.2e-6),
        PLAN,
        0.0003,
    )
    assert timing.t_k_ms == pytest.approx(3e-3)


def test_the_median_repeat_counts_and_the_spread_is_told():
    timing = timing_from(measured([0.0] * 3, [0.010, 0.011, 0.030]), Calibration(), PLAN, 0.0)
    assert timing.t_k_ms == pytest.approx(0.11)
    assert timing.spread == pytest.approx((0.030 - 0.010) / 0.011)


def test_short_batches_are_marked():
    timing = timing_from(measured([0.001] * 5, [0.001] * 5), Calibration(), PLAN, 0.01)
    assert any("shorter" in mark for mark in timing.marks)


def test_calibration_takes_the_largest_honest_overhead_and_handshake():
    fast = measured([0.0102, 0.0104], [0.010, 0.010], n=1000, singles=[21e-6] * 5)
    slow = measured([0.0105, 0.0103], [0.010, 0.010], n=1000, singles=[22e-6] * 5)
    calibration = Calibration.from_honest([fast, slow])
    assert calibration.overhead_s == pytest.approx(0.0005)
    assert calibration.handshake_s == pytest.approx(12e-6)
    # What it costs on a quiet machine follows from the smallest seen.
    assert calibration.quiet_overhead_s == pytest.approx(1.5 * 0.0002 + 0.0001)
    assert calibration.quiet_handshake_s == pytest.approx(1.5 * 11e-6 + 0.5e-6)


def test_a_machine_busy_at_calibration_gives_a_lie_no_more_than_a_tenth():
    # As measured on two cores under a load of 13: 6.1 ms of overhead, batches of 17 ms.
    busy = Calibration(overhead_s=0.0061, quiet_overhead_s=0.0005)
    lie = timing_from(measured([0.017] * 5, [0.0] * 5), busy, PLAN, 0.01)
    assert lie.t_k_ms == pytest.approx(0.9 * 17 / 100)
    assert lie.overhead_ms == pytest.approx(1.7)


def test_an_honest_time_in_a_short_batch_is_not_raised_on_a_quiet_machine():
    # 256 calls of 3 us: the overhead is a quarter of the batch, and always was.
    honest = [measured([0.00077 + o], [0.00077], n=256) for o in (0.00017, 0.00022, 0.00033)]
    calibration = Calibration.from_honest(honest)
    assert calibration.overhead_s == pytest.approx(0.00033)
    for m in honest:
        assert timing_from(m, calibration, PLAN, 0.01).t_k_ms == pytest.approx(0.77 / 256)


def test_a_round_trip_is_hand_shake_to_a_tenth_or_to_what_a_quiet_machine_has():
    busy = Calibration(handshake_s=2e-3, quiet_handshake_s=0.1e-3)
    assert busy.handshake_of(0.2e-3) == pytest.approx(0.1e-3)
    assert busy.handshake_of(5e-3) == pytest.approx(0.5e-3)
    assert Calibration(handshake_s=9e-6, quiet_handshake_s=14e-6).handshake_of(12e-6) == 9e-6


@pytest.mark.parametrize(
    ("overhead_s", "expected"), [(0.0, 0.01), (0.0005, 0.01), (0.002, 0.02), (0.05, 0.04)]
)
def test_batches_are_ten_times_as_long_as_the_overhead_within_reason(overhead_s, expected):
    assert Calibration(overhead_s=overhead_s).batch_s(0.01) == pytest.approx(expected)


@pytest.mark.parametrize(("per_call", "expected"), [(1e-3, 10), (1e-6, 256), (1.0, 1), (0.0, 256)])
def test_a_batch_is_filled_up_to_the_most_sets(per_call, expected):
    assert sets_for(per_call, 0.01, 256) == expected


def test_calibration_takes_what_a_first_request_costs():
    one = measured([0.01], [0.01], n=1000, singles=[80e-6, 20e-6, 21e-6, 20e-6, 20e-6], tail=50e-6)
    calibration = Calibration.from_honest([one])
    assert calibration.first_request_s == pytest.approx(111e-6)


CALIBRATED = Calibration(0.0003, 10e-6, 0.0003, 10e-6, first_request_s=100e-6)


def test_working_the_pool_off_at_the_first_request_does_not_pay():
    # The whole pool takes 900 us at the first request; the others are looked up.
    series = measured([0.0005] * 5, [0.0002] * 5, singles=[900e-6] + [11e-6] * 9)
    assert singles_would_count(series, CALIBRATED, PLAN)
    timing = timing_from(series, CALIBRATED, PLAN, 0.01)
    assert timing.t_k_ms == pytest.approx(0.97 * (89.9e-3 - 10e-3))
    assert any("together" in mark for mark in timing.marks)


def test_putting_work_off_until_after_the_answers_does_not_pay():
    series = measured([0.0005] * 5, [0.0002] * 5, singles=[11e-6] * 10, tail=900e-6)
    assert timing_from(series, CALIBRATED, PLAN, 0.01).t_k_ms > 0.07


def test_a_hiccup_in_one_round_is_not_held_against_anybody():
    series = measured([0.0013] * 5, [0.0010] * 5, singles=[2e-3] + [20e-6] * 9)
    assert singles_would_count(series, CALIBRATED, PLAN)
    series.rounds.append(SingleRound([80e-6] + [20e-6] * 9, 30e-6))
    assert not singles_would_count(series, CALIBRATED, PLAN)
    assert timing_from(series, CALIBRATED, PLAN, 0.001).t_k_ms == pytest.approx(10e-3)


def test_an_unknown_first_request_limits_nothing():
    series = measured([0.0013] * 5, [0.0010] * 5, singles=[2e-3] + [20e-6] * 9)
    assert not singles_would_count(series, Calibration(0.0003, 10e-6, 0.0003, 10e-6), PLAN)


@pytest.mark.parametrize(
    ("per_call", "most", "expected"),
    [
        (1e-6, 1000, (64, 16)),
        (1e-6, 8, (8, 4)),
        (4e-3, 1000, (12, 3)),
        (0.04, 1000, (6, 3)),
        (0.1, 1, (1, 1)),
    ],
)
def test_only_a_part_of_the_pool_is_asked_for(per_call, most, expected):
    assert PLAN.singles(per_call, most) == expected
