"""Device models: figures, scaling, recognition."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sol_gym import device as device_module
from sol_gym.device import (
    Device,
    GpuProperties,
    derive,
    detect,
    device_to_judge_on,
    get_device,
    gpu_state,
    known_devices,
)
from sol_gym.errors import DeviceError

GPUS = [key for key in known_devices() if key != "cpu"]
H100_PCIE = GpuProperties(
    name="NVIDIA H100 PCIe",
    compute_capability=(9, 0),
    cores=14592,
    max_sm_clock_mhz=1755,
    max_memory_clock_mhz=1593,
    memory_bus_bits=5120,
    memory_bytes=80 * 10**9,
)


@pytest.mark.parametrize("key", GPUS)
def test_every_figure_is_positive_and_has_a_source(key):
    device = get_device(key)
    assert device.key == device.fingerprint == key
    assert all(rate > 0 for rate in device.peak_flops.values())
    assert {"peak_flops", "bandwidth_bytes_per_s"} <= set(device.sources)
    assert device.sm_clock_mhz and device.l2_bytes and device.memory_bytes and device.sm_count
    assert Device.model_validate_json(device.model_dump_json()) == device


@pytest.mark.parametrize("key", GPUS)
def test_narrower_formats_are_never_slower(key):
    device = get_device(key)
    rates = [
        device.rate(u) for u in ("fp32_fma", "fp32", "tf32_tc", "bf16_tc", "fp8_tc", "nvfp4_tc")
    ]
    assert rates == sorted(rates)
    assert device.rate("fp16_tc") == device.rate("bf16_tc")


def test_published_b200_figures_are_per_cycle_at_1500_mhz():
    b200 = get_device("b200-1500")
    cycles = 1.5e9
    assert b200.rate("bf16_tc") / 2 / cycles == pytest.approx(603_751)
    assert b200.rate("fp8_tc") / 2 / cycles == pytest.approx(1_207_501)
    assert b200.rate("nvfp4_tc") / 2 / cycles == pytest.approx(2_415_000)
    assert b200.bandwidth_bytes_per_s / cycles == pytest.approx(5_111.6)


def test_hopper_has_no_four_bit_units_and_runs_them_at_the_fp8_rate():
    h200 = get_device("h200")
    assert h200.rate("nvfp4_tc") == h200.rate("fp8_tc") == 1979e12


def test_float32_accuracy_takes_the_fastest_way_there_is():
    h200 = get_device("h200")
    assert h200.rate("fp32") == pytest.approx(989e12 / 3)  # three passes of float16 halves

    def with_peaks(**peaks: float) -> Device:
        return h200.model_copy(update={"peak_flops": h200.peak_flops | peaks})

    assert with_peaks(fp16=100e12).rate("fp32") == pytest.approx(989e12 / 6)
    assert with_peaks(fp16=100e12, bf16=100e12).rate("fp32") == pytest.approx(494e12 / 3)
    assert with_peaks(fp16=100e12, bf16=100e12, tf32=90e12).rate("fp32") == 67e12


def test_tensor_rates_are_units_times_clock():
    # 2048 bf16 multiply-adds per SM and clock on Hopper; a wrong clock would scale wrongly.
    h200 = get_device("h200")
    units = h200.rate("bf16_tc") / 2 / h200.sm_count / (h200.sm_clock_mhz * 1e6)
    assert units == pytest.approx(2048, rel=1e-3)


def test_another_clock_scales_rates_and_leaves_memory_alone():
    h200 = get_device("h200")
    slow = h200.at_clock(h200.sm_clock_mhz // 2)
    assert slow.rate("bf16_tc") == h200.rate("bf16_tc") / 2
    assert slow.rate("fp32") == pytest.approx(h200.rate("fp32") / 2)
    assert slow.bandwidth_bytes_per_s == h200.bandwidth_bytes_per_s
    assert slow.key == f"h200-{h200.sm_clock_mhz // 2}"
    with pytest.raises(DeviceError, match="both clocks must be known and positive"):
        h200.at_clock(0)
    with pytest.raises(DeviceError, match="from None MHz"):
        h200.model_copy(update={"sm_clock_mhz": None}).at_clock(1000)


def test_bandwidth_is_the_memorys_unless_caches_keep_the_working_set():
    h200 = get_device("h200")
    assert {h200.bandwidth_for(n) for n in (1, 10**6, 10**12)} == {4.8e12}
    levels = ((1 << 16, 9e9), (1 << 20, 3e9), (1 << 28, 1e9))
    cpu = h200.model_copy(update={"cache_levels": levels, "bandwidth_bytes_per_s": 1e9})
    sizes = (0, 1 << 16, (1 << 20) - 1, 1 << 20, (1 << 28) - 1, 1 << 28, 1 << 40)
    # Between two measured sizes the smaller one's, which is the higher, holds.
    assert [cpu.bandwidth_for(n) for n in sizes] == [9e9, 9e9, 9e9, 3e9, 3e9, 1e9, 1e9]


def test_unknown_names_suggest_near_ones():
    with pytest.raises(DeviceError, match=r"unknown device 'h20'.*did you mean 'h200'\?"):
        get_device("h20")
    with pytest.raises(DeviceError, match="no unit 'int4_tc'"):
        get_device("h200").rate("int4_tc")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_gpus_are_recognised_by_name(monkeypatch, name, key):
    monkeypatch.setattr(device_module, "_gpu", lambda: GpuProperties(name))
    assert detect() == get_device("auto") == get_device(key)


def test_a_board_that_may_run_faster_than_the_datasheet_gets_higher_rates(monkeypatch):
    board = GpuProperties("NVIDIA H200", max_sm_clock_mhz=1980)
    monkeypatch.setattr(device_module, "_gpu", lambda: board)
    for here in (detect(), device_to_judge_on("auto"), device_to_judge_on("h200")):
        assert (here.key, here.sm_clock_mhz) == ("h200", 1980)
        # 132 SMs x 2,048 multiply-adds at that clock.
        assert here.rate("bf16_tc") == pytest.approx(2e6 * 132 * 2048 * 1980, rel=1e-3)
    assert get_device("h200").rate("bf16_tc") == 989e12
    assert device_to_judge_on("b200") == get_device("b200")


def test_gpu_of_a_known_architecture_is_modelled_from_its_properties(monkeypatch):
    monkeypatch.setattr(device_module, "_gpu", lambda: H100_PCIE)
    device = detect()
    assert device.key == "h100-pcie" and device.sm_count == 114
    # The datasheet's dense peaks, 756 and 1513 TFLOP/s and 2 TB/s, are at or below.
    assert device.rate("bf16_tc") == pytest.approx(819e12, rel=0.01)
    assert device.bandwidth_bytes_per_s == pytest.approx(2.04e12, rel=0.01)


def test_gpu_that_cannot_be_modelled_says_how_to_add_it(monkeypatch):
    gpu = H100_PCIE._replace(name="NVIDIA Fermi", compute_capability=(2, 0))
    with pytest.raises(DeviceError, match=r"no device model for 'NVIDIA Fermi'.*2\.0.*_MODELS"):
        derive(gpu)
    monkeypatch.setattr(device_module, "_gpu", lambda: GpuProperties("NVIDIA Mystery"))
    with pytest.raises(DeviceError, match="NVIDIA Mystery"):
        detect()


def test_hidden_gpus_are_not_detected(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_module._gpu() is None


def test_state_without_a_gpu_is_unknown_rather_than_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device_module.nvml_handle.cache_clear()
    assert gpu_state() == {"sm_clock_mhz": None, "throttled": False, "locked": False}


def test_models_need_no_torch():
    code = (
        "import sys; from sol_gym.device import get_device; get_device('h200');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_gpu_here_agrees_with_its_model():
    import torch

    device = detect()
    properties = torch.cuda.get_device_properties(0)
    assert device.sm_count == properties.multi_processor_count
    assert device.compute_capability == (properties.major, properties.minor)
    assert device.l2_bytes == properties.L2_cache_size
    assert 0.9 < properties.total_memory / device.memory_bytes < 1.1
    assert gpu_state()["sm_clock_mhz"] > 0
