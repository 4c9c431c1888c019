"""Device models: what the hardware can do at most, and which one is here.

A bound is only as good as its peaks: they must not be beatable, so GPU models hold the vendor's
dense datasheet rates (or architectural units times the clock), and the CPU model what this machine
has shown at its best, with headroom. Adding a GPU is adding one entry to `_MODELS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import DeviceError
from .paths import cache_dir

_MIB, _GIB = 1 << 20, 1 << 30


class Device(BaseModel):
    """A hardware model. Rates are dense, in FLOP/s (2 per multiply-add), at `sm_clock_mhz`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    key: str
    """Short name: `h200`, `b200-1500`, `cpu`."""
    name: str
    """The hardware's own name."""
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 0
    """Streaming multiprocessors, or cores of a CPU."""
    sm_clock_mhz: int | None = None
    """Clock that the rates hold at."""
    peak_flops: dict[str, float]
    """Precision class -> FLOP/s: bf16, fp16, tf32, fp8, nvfp4 (tensor units), fp32, fp64 (FMA units).

    A class that the hardware has no units for carries the rate of the fastest way to do it."""
    sfu_ops: float | None = None
    """Special functions (exp, rsqrt ...) a second; advisory."""
    bandwidth_bytes_per_s: float
    """Off-chip memory."""
    cache_levels: tuple[tuple[int, float], ...] = ()
    """(bytes, bytes/s) of caches that may hold a workload between calls; only used on a CPU."""
    l2_bytes: int
    """Last-level cache."""
    shared_bytes_per_sm: int = 0
    register_bytes_per_sm: int = 0
    memory_bytes: int = 0
    launch_ms: float | None = None
    """Least time of a launch, measured; None where it is not known."""
    calibrated: bool = False
    """True where the figures were measured on the machine at hand."""
    fingerprint: str
    """What measured baselines of this device depend on: the model, or this machine for a CPU."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Figure -> where it comes from."""

    def bandwidth_for(self, working_set_bytes: float) -> float:
        """Bytes/s at which a working set can be moved at most.

        A GPU's batches are cold by the judge's doing, so it is the memory's. On a CPU a small
        working set may live in a cache, whose bandwidth then is the roof.
        """
        for capacity, bandwidth in self.cache_levels:
            if working_set_bytes <= capacity:
                return max(bandwidth, self.bandwidth_bytes_per_s)
        return self.bandwidth_bytes_per_s

    def at_clock(self, mhz: int) -> Device:
        """This device with its compute rates scaled to another clock (memory keeps its own)."""
        if not self.sm_clock_mhz:
            raise DeviceError(f"{self.key} has no clock to scale from")
        factor = mhz / self.sm_clock_mhz
        return self.model_copy(
            update={
                "key": f"{self.key.split('-')[0]}-{mhz}",
                "sm_clock_mhz": mhz,
                "peak_flops": {k: v * factor for k, v in self.peak_flops.items()},
                "sfu_ops": self.sfu_ops * factor if self.sfu_ops else None,
            }
        )


_HOPPER_RATES = {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp8": 1979e12, "nvfp4": 1979e12, "fp32": 67e12, "fp64": 67e12}
_HOPPER_SOURCES = {
    "peak_flops": "NVIDIA H100/H200 SXM datasheet, dense; nvfp4 has no units and runs at the fp8 rate",
    "sfu_ops": "132 SMs x 16 special-function units x 1.83 GHz",
    "l2_bytes": "reported by the driver (cudaDeviceProp.l2CacheSize)",
    "shared_bytes_per_sm": "CUDA programming guide, compute capability 9.0",
}

_MODELS: dict[str, dict[str, Any]] = {
    "h200": {
        "name": "NVIDIA H200",
        "compute_capability": (9, 0),
        "sm_count": 132,
        "sm_clock_mhz": 1980,
        "peak_flops": _HOPPER_RATES,
        "sfu_ops": 3864.96e9,
        "bandwidth_bytes_per_s": 4.8e12,
        "l2_bytes": 60 * _MIB,
        "shared_bytes_per_sm": 228 * 1024,
        "register_bytes_per_sm": 256 * 1024,
        "memory_bytes": 141 * 10**9,
        "sources": _HOPPER_SOURCES | {"bandwidth_bytes_per_s": "NVIDIA H200 datasheet: 4.8 TB/s"},
    },
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "compute_capability": (9, 0),
        "sm_count": 132,
        "sm_clock_mhz": 1980,
        "peak_flops": _HOPPER_RATES,
        "sfu_ops": 3864.96e9,
        "bandwidth_bytes_per_s": 3.35e12,
        "l2_bytes": 50 * _MIB,
        "shared_bytes_per_sm": 228 * 1024,
        "register_bytes_per_sm": 256 * 1024,
        "memory_bytes": 80 * 10**9,
        "sources": _HOPPER_SOURCES | {"bandwidth_bytes_per_s": "NVIDIA H100 SXM datasheet: 3.35 TB/s"},
    },
    "b200": {
        "name": "NVIDIA B200",
        "compute_capability": (10, 0),
        "sm_count": 148,
        "sm_clock_mhz": 1965,
        "peak_flops": {"bf16": 2.25e15, "fp16": 2.25e15, "tf32": 1.125e15, "fp8": 4.5e15, "nvfp4": 9e15, "fp32": 80e12, "fp64": 40e12},
        "sfu_ops": 148 * 16 * 1.965e9,
        "bandwidth_bytes_per_s": 8e12,
        "l2_bytes": 126 * _MIB,
        "shared_bytes_per_sm": 228 * 1024,
        "register_bytes_per_sm": 256 * 1024,
        "memory_bytes": 180 * 10**9,
        "sources": {
            "peak_flops": "NVIDIA HGX B200 datasheet, dense, per GPU",
            "bandwidth_bytes_per_s": "NVIDIA HGX B200 datasheet: 8 TB/s",
            "sm_clock_mhz": "boost clock as reported by the driver",
        },
    },
    "b200-1500": {
        "name": "NVIDIA B200",
        "compute_capability": (10, 0),
        "sm_count": 148,
        "sm_clock_mhz": 1500,
        "peak_flops": {
            "bf16": 1811.253e12, "fp16": 1811.253e12, "tf32": 905.625e12, "fp8": 3622.503e12,
            "nvfp4": 7245e12, "fp32": 56.832e12, "fp64": 28.416e12,
        },
        "sfu_ops": 3.552e12,
        "bandwidth_bytes_per_s": 7.6674e12,
        "l2_bytes": 126 * _MIB,
        "shared_bytes_per_sm": 228 * 1024,
        "register_bytes_per_sm": 256 * 1024,
        "memory_bytes": 180 * 10**9,
        "sources": {
            "peak_flops": "read off the published SOL-ExecBench bounds (603,751 bf16 multiply-adds a cycle at 1.5 GHz); "
            "fp32: 148 SMs x 128 FMA x 1.5 GHz",
            "bandwidth_bytes_per_s": "likewise: 5,111.6 bytes a cycle at 1.5 GHz",
        },
    },
}  # fmt: skip

_NVML_NAMES = (("H200", "h200"), ("H100 80GB HBM3", "h100"), ("H100 SXM", "h100"), ("B200", "b200"))


def known_devices() -> list[str]:
    """Keys that `get_device` takes, besides "auto"."""
    return [*_MODELS, "cpu"]


def get_device(key: str = "auto") -> Device:
    """The device model of that key; "auto" is the one that is here.

    Raises:
        DeviceError: unknown key, or (for "auto") a GPU that no model describes.
    """
    if key == "auto":
        return detect()
    if key == "cpu":
        return calibrate_cpu()
    if key not in _MODELS:
        raise DeviceError(f"unknown device {key!r}; known: {', '.join(known_devices())}, or auto")
    return Device(key=key, fingerprint=key, **_MODELS[key])


def detect() -> Device:
    """The model of the first visible NVIDIA GPU, or of this CPU where there is none.

    Raises:
        DeviceError: there is a GPU that no model describes.
    """
    name = _gpu_name()
    if name is None:
        return calibrate_cpu()
    for part, key in _NVML_NAMES:
        if part in name:
            return get_device(key)
    raise DeviceError(
        f"no device model for {name!r}; add one to sol_gym/device.py (_MODELS) or use --device cpu; "
        f"known: {', '.join(known_devices())}"
    )


def _gpu_name() -> str | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount():
            name = pynvml.nvmlDeviceGetName(_handle(0))
            return name.decode() if isinstance(name, bytes) else str(name)
    return None


def _handle(index: int) -> Any:
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",")[index] if visible else str(index)
    if chosen.startswith("GPU-"):
        return pynvml.nvmlDeviceGetHandleByUUID(chosen)
    return pynvml.nvmlDeviceGetHandleByIndex(int(chosen))


_THROTTLING = (
    "nvmlClocksEventReasonHwSlowdown", "nvmlClocksEventReasonSwThermalSlowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown", "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
)  # fmt: skip


def gpu_state(index: int = 0) -> dict[str, Any]:
    """Clock and throttling of a GPU now, through NVML.

    Returns:
        {"sm_clock_mhz": int | None, "throttled": bool, "locked": bool}. Throttled means slowed down
        for heat or by the hardware; running into the power limit is a GPU's normal state under load.
    """
    state: dict[str, Any] = {"sm_clock_mhz": None, "throttled": False, "locked": False}
    with contextlib.suppress(Exception):
        import pynvml

        handle = _nvml_handle(index)
        state["sm_clock_mhz"] = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        bad = 0
        for name in _THROTTLING:
            bad |= getattr(pynvml, name, 0)
        state["throttled"] = bool(reasons & bad)
        state["locked"] = bool(reasons & getattr(pynvml, "nvmlClocksThrottleReasonApplicationsClocksSetting", 0))
    return state


@cache
def _nvml_handle(index: int) -> Any:
    import pynvml

    pynvml.nvmlInit()
    return _handle(index)


# -- the CPU at hand ------------------------------------------------------------------------------

_HEADROOM = 1.25
"""Measured CPU peaks are raised by this: a bound must not be beaten by a lucky run."""
_WORKING_SETS = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)


def machine_fingerprint() -> str:
    """12 hex digits over what CPU figures depend on: processor, usable cores, memory, torch."""
    import importlib.metadata

    facts = [_cpu_name(), len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") // 2**18, platform.machine()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts.append(importlib.metadata.version("torch"))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def calibrate_cpu(*, force: bool = False) -> Device:
    """The CPU at hand as a device model: GEMM rates and copy bandwidth, measured once and cached.

    Bandwidth is measured for several working sets, since small ones live in caches. Takes a few
    seconds the first time; the cache is keyed by `machine_fingerprint`. A forced calibration keeps
    the best of the old and the new figures, because a busy machine looks slower than it is: delete
    the file (`sol-gym doctor` names the folder) to start over.
    """
    fingerprint = machine_fingerprint()
    file = cache_dir() / f"cpu-{fingerprint}.json"
    known = None
    with contextlib.suppress(OSError, ValidationError, ValueError):
        known = Device.model_validate_json(file.read_text())
    if known and not force:
        return known
    device = _measure_cpu(fingerprint)
    if known:
        device = _best_of(known, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False) as staging:
        staging.write(device.model_dump_json(indent=1))
    os.replace(staging.name, file)
    return device


def _best_of(old: Device, new: Device) -> Device:
    levels = zip(old.cache_levels, new.cache_levels, strict=True)
    return new.model_copy(
        update={
            "peak_flops": {k: max(v, old.peak_flops.get(k, 0.0)) for k, v in new.peak_flops.items()},
            "bandwidth_bytes_per_s": max(old.bandwidth_bytes_per_s, new.bandwidth_bytes_per_s),
            "cache_levels": tuple((size, max(a, b)) for (size, a), (_, b) in levels),
        }
    )


def _measure_cpu(fingerprint: str) -> Device:
    import torch

    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        rates = {
            "fp32": max(_gemm_rate(torch.float32, n) for n in (512, 1024, 1536)),
            "bf16": max(_gemm_rate(torch.bfloat16, n) for n in (512, 1024)),
            "fp64": _gemm_rate(torch.float64, 768),
        }
        levels = [(size, _copy_bandwidth(size)) for size in _WORKING_SETS]
    finally:
        torch.set_num_threads(threads)
    peak = {k: v * _HEADROOM for k, v in rates.items()}
    # A kernel may compute low precision in whatever unit is fastest.
    fastest = max(peak["fp32"], peak["bf16"])
    peak |= {"bf16": fastest, "fp16": fastest, "tf32": fastest, "fp8": fastest, "nvfp4": fastest}
    # No level may look slower than a larger one.
    running, monotone = 0.0, []
    for size, bandwidth in reversed(levels):
        running = max(running, bandwidth)
        monotone.append((size, running * _HEADROOM))
    monotone.reverse()
    return Device(
        key="cpu",
        name=_cpu_name(),
        sm_count=cores,
        peak_flops=peak,
        bandwidth_bytes_per_s=monotone[-1][1],
        cache_levels=tuple(monotone[:-1]),
        l2_bytes=_last_level_cache(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        calibrated=True,
        fingerprint=f"cpu-{fingerprint}",
        sources={
            "peak_flops": f"best of repeated GEMMs on this machine, times {_HEADROOM} headroom",
            "bandwidth_bytes_per_s": f"best copy (read plus write) of 256 MiB on this machine, times {_HEADROOM}",
            "cache_levels": f"best copies of smaller working sets, times {_HEADROOM}",
        },
    )


def _gemm_rate(dtype: Any, n: int) -> float:
    import torch

    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b))


def _copy_bandwidth(working_set: int) -> float:
    import torch

    half = working_set // 2
    source = torch.ones(half, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * half / _best_seconds(lambda: target.copy_(source))


def _best_seconds(call: Callable[[], Any], budget_s: float = 0.25) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _last_level_cache() -> int:
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            factor = {"K": 1024, "M": _MIB, "G": _GIB}.get(text[-1], 1)
            sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes, default=32 * _MIB)
