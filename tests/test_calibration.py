"""Calibration of the CPU: measured once, kept, and never below what the machine shows."""

from __future__ import annotations

import time

import pytest
import torch

from sol_gym import calibration
from sol_gym.calibration import best_of, calibrated_cpu, machine_fingerprint
from sol_gym.device import Device, get_device
from sol_gym.paths import cache_dir


@pytest.fixture(scope="module")
def cpu() -> Device:
    return get_device("cpu")


def cache_file():
    return cache_dir() / f"cpu-{machine_fingerprint()}.json"


def test_model_says_that_and_how_it_was_measured(cpu):
    assert cpu.key == "cpu" and cpu.calibrated
    assert cpu.sm_count == calibration.usable_cores()
    assert "calibrated" in cpu.sources["peak_flops"] and "1.25" in cpu.sources["peak_flops"]
    assert cpu.fingerprint == f"cpu-{machine_fingerprint()}"


def test_every_precision_has_a_rate(cpu):
    for unit in ("nvfp4_tc", "fp8_tc", "fp16_tc", "bf16_tc", "tf32_tc", "fp32", "fp32_fma", "fp64"):
        assert cpu.rate(unit) > 0
    assert cpu.rate("bf16_tc") >= cpu.rate("fp32")


def test_larger_working_sets_are_never_faster(cpu):
    rates = [rate for _, rate in cpu.cache_levels]
    assert rates == sorted(rates, reverse=True)
    assert cpu.bandwidth_for(2**40) == rates[-1] == cpu.bandwidth_bytes_per_s


@pytest.mark.parametrize("size", [2**15, 2**21, 2**27])
def test_copies_do_not_beat_the_roof(cpu, size):
    source = torch.ones(size // 8)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    assert size / best < cpu.bandwidth_for(size)


def test_products_do_not_beat_the_roof(cpu):
    a = torch.ones(640, 640)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    assert 2 * 640**3 / best < cpu.rate("fp32")


def test_measuring_leaves_the_number_of_threads_alone(monkeypatch):
    monkeypatch.setattr(calibration, "_PRODUCT_S", 1e-3)
    monkeypatch.setattr(calibration, "_TRAFFIC_S", 1e-3)
    monkeypatch.setattr(calibration, "_WORKING_SETS", (2**16, 2**20))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calibration.measure_cpu()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_second_call_reads_the_file(cpu):
    start = time.perf_counter()
    assert calibrated_cpu() == cpu
    assert time.perf_counter() - start < 0.5
    assert Device.model_validate_json(cache_file().read_text()) == cpu


@pytest.mark.parametrize("damage", ["", "{", '{"key": "cpu"}', "\x00\x01"])
def test_damaged_file_is_measured_again(cpu, damage, monkeypatch):
    measured = cpu.model_copy(update={"name": "measured again"})
    monkeypatch.setattr(calibration, "measure_cpu", lambda: measured)
    whole = cache_file().read_text()
    try:
        cache_file().write_text(damage)
        assert calibrated_cpu().name == "measured again"
        assert Device.model_validate_json(cache_file().read_text()).name == "measured again"
    finally:
        cache_file().write_text(whole)


def test_forced_calibration_keeps_the_better_of_old_and_new(cpu):
    worse = cpu.model_copy(
        update={
            "peak_flops": {k: v / 2 for k, v in cpu.peak_flops.items()},
            "bandwidth_bytes_per_s": cpu.bandwidth_bytes_per_s / 2,
            "cache_levels": tuple((size, rate / 2) for size, rate in cpu.cache_levels),
        }
    )
    assert best_of(cpu, worse) == best_of(worse, cpu) == cpu


def test_folder_that_cannot_be_written_is_no_error(cpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SOL_GYM_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(calibration, "measure_cpu", lambda: cpu)
    assert calibrated_cpu() == cpu
