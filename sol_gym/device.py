"""Device models: what the hardware can do at most, and which one is here.

A bound is only as good as its peaks: they must not be beatable. GPU models hold the vendor's dense
datasheet rates (or architectural units times the clock) with the clock that these hold at, and a
board that is here and may run faster gets them at its own highest clock (`detect`). The CPU model
is what this machine has shown at its best, with headroom (`calibration`). Adding a GPU is adding
one entry to `_MODELS` and its name to `_NVML_NAMES`; a GPU that has none is modelled from its own
properties where its architecture is known.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from .errors import DeviceError

_MIB = 1 << 20


class Device(BaseModel):
    """A hardware model. Rates are dense, in FLOP/s (2 per multiply-add), at `sm_clock_mhz`.

    Example:
        >>> h200 = get_device("h200")
        >>> round(h200.rate("bf16_tc") / h200.bandwidth_bytes_per_s)  # FLOPs a byte at the ridge
        206
    """

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
    """(bytes, bytes/s), ascending: working sets from so many bytes up move so fast at most, because
    smaller ones fit closer caches. Only on a CPU, whose caches nobody flushes."""
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

    def rate(self, unit: str) -> float:
        """Peak FLOP/s of a unit, or of the fastest way there is to do its work.

        Args:
            unit: `nvfp4_tc`, `fp8_tc`, `fp16_tc`, `bf16_tc`, `tf32_tc` (tensor cores), `fp32_fma`
                and `fp64` (vector units), or `fp32`: any way that is as accurate as float32. That
                is FMA units, three passes of TF32 or of scaled float16 halves (Ootomo and Yokota,
                "Recovering single precision accuracy from Tensor Cores", 2022), or six passes of
                bfloat16 (the mode `bf16x6` of XLA and Triton).

        Raises:
            DeviceError: there is no such unit.
        """
        peak = self.peak_flops
        if unit == "fp32":
            return max(peak["fp32"], peak["tf32"] / 3, peak["fp16"] / 3, peak["bf16"] / 6)
        name = {"fp32_fma": "fp32"}.get(unit, unit.removesuffix("_tc"))
        if name not in peak:
            raise DeviceError(f"{self.key} has no unit {unit!r}; its classes are {', '.join(peak)}")
        # A narrower class can always be done by the units of a wider one.
        return max(peak[name], self.rate("fp32")) if unit.endswith("_tc") else peak[name]

    def bandwidth_for(self, working_set_bytes: float) -> float:
        """Bytes/s at which a working set can be moved at most.

        A GPU's batches are cold by the judge's doing, so it is the memory's. On a CPU a small
        working set may live in a cache, whose bandwidth then is the roof.
        """
        if not self.cache_levels:
            return self.bandwidth_bytes_per_s
        fitting = [rate for size, rate in self.cache_levels if size <= working_set_bytes]
        return fitting[-1] if fitting else self.cache_levels[0][1]

    def at_clock(self, mhz: int) -> Device:
        """This device with its compute rates scaled to another clock (memory keeps its own).

        Raises:
            DeviceError: the clock is not positive, or the model has none to scale from.
        """
        if not self.sm_clock_mhz or mhz <= 0:
            raise DeviceError(
                f"{self.key}: cannot scale rates from {self.sm_clock_mhz} MHz to {mhz} MHz; "
                "both clocks must be known and positive"
            )
        factor = mhz / self.sm_clock_mhz
        return self.model_copy(
            update={
                "key": f"{self.key.split('-')[0]}-{mhz}",
                "sm_clock_mhz": mhz,
                "peak_flops": {k: v * factor for k, v in self.peak_flops.items()},
                "sfu_ops": self.sfu_ops * factor if self.sfu_ops else None,
            }
        )


class _Architecture(NamedTuple):
    """FMAs per SM and clock of each class, and sizes, of one compute capability."""

    nvfp4: int
    fp8: int
    bf16: int
    tf32: int
    fp32: int
    fp64: int
    l2_bytes: int
    shared_bytes: int


_ARCHITECTURES = {
    (8, 0): _Architecture(1024, 1024, 1024, 512, 64, 64, 40 * _MIB, 164 * 1024),
    (9, 0): _Architecture(4096, 4096, 2048, 1024, 128, 128, 60 * _MIB, 228 * 1024),
    (10, 0): _Architecture(16384, 8192, 4096, 2048, 128, 64, 126 * _MIB, 228 * 1024),
}
"""Source: NVIDIA's A100, H100 and B200 architecture papers, and the CUDA programming guide."""


def _peaks(capability: tuple[int, int], sms: int, mhz: int) -> dict[str, float]:
    """Peak FLOP/s of each class: 2 x units per SM x SMs x clock."""
    architecture = _ARCHITECTURES[capability]
    units = {
        name: getattr(architecture, name)
        for name in ("bf16", "tf32", "fp8", "nvfp4", "fp32", "fp64")
    }
    return {
        name: 2e6 * count * sms * mhz for name, count in ({"fp16": units["bf16"]} | units).items()
    }


_HOPPER_SMS, _HOPPER_MHZ = 132, 1830
_HOPPER_RATES = {
    "bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp8": 1979e12, "nvfp4": 1979e12,
    "fp32": 67e12, "fp64": 67e12,
}  # fmt: skip
_HOPPER_SOURCES = {
    "peak_flops": "NVIDIA H100/H200 SXM datasheet, dense; nvfp4 has no units and runs at the fp8 rate",
    "sm_clock_mhz": "clock behind the datasheet's tensor rates: 989e12 / (132 SMs x 2,048 FMA x 2); "
    "boards may run at 1,980, which `detect` allows for",
    "sfu_ops": "132 SMs x 16 special-function units x 1.83 GHz",
    "l2_bytes": "reported by the driver (cudaDeviceProp.l2CacheSize)",
    "shared_bytes_per_sm": "CUDA programming guide, compute capability 9.0",
    "register_bytes_per_sm": "CUDA programming guide, compute capability 9.0",
}

_MODELS: dict[str, dict[str, Any]] = {
    "h200": {
        "name": "NVIDIA H200",
        "compute_capability": (9, 0),
        "sm_count": _HOPPER_SMS,
        "sm_clock_mhz": _HOPPER_MHZ,
        "peak_flops": _HOPPER_RATES,
        "sfu_ops": 16e6 * _HOPPER_SMS * _HOPPER_MHZ,
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
        "sm_count": _HOPPER_SMS,
        "sm_clock_mhz": _HOPPER_MHZ,
        "peak_flops": _HOPPER_RATES,
        "sfu_ops": 16e6 * _HOPPER_SMS * _HOPPER_MHZ,
        "bandwidth_bytes_per_s": 3.35e12,
        "l2_bytes": 50 * _MIB,
        "shared_bytes_per_sm": 228 * 1024,
        "register_bytes_per_sm": 256 * 1024,
        "memory_bytes": 80 * 10**9,
        "sources": _HOPPER_SOURCES
        | {"bandwidth_bytes_per_s": "NVIDIA H100 SXM datasheet: 3.35 TB/s"},
    },
    "b200": {
        "name": "NVIDIA B200",
        "compute_capability": (10, 0),
        "sm_count": 148,
        "sm_clock_mhz": 1965,
        "peak_flops": _peaks((10, 0), 148, 1965) | {"fp32": 80e12, "fp64": 40e12},
        "sfu_ops": 148 * 16 * 1.965e9,
        "bandwidth_bytes_per_s": 8e12,
        "l2_bytes": 126 * _MIB,
        "shared_bytes_per_sm": 228 * 1024,
        "register_bytes_per_sm": 256 * 1024,
        "memory_bytes": 180 * 10**9,
        "sources": {
            "peak_flops": "tensor units: 148 SMs x 4,096 bf16 FMA x 2 x the maximum clock, twice "
            "that for fp8 and four times for nvfp4, half for tf32 (the datasheet's 2.25, 4.5 and 9 "
            "PFLOP/s hold at 1,856 MHz); fp32, fp64: NVIDIA B200 datasheet, more than units x clock",
            "bandwidth_bytes_per_s": "NVIDIA HGX B200 datasheet: 8 TB/s",
            "sm_clock_mhz": "maximum SM clock that NVML reports",
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
            "peak_flops": "read off the published SOL-ExecBench bounds (603,751 bf16 multiply-adds "
            "a cycle at 1.5 GHz); fp32: 148 SMs x 128 FMA x 1.5 GHz",
            "bandwidth_bytes_per_s": "likewise: 5,111.6 bytes a cycle at 1.5 GHz",
        },
    },
}  # fmt: skip

_NVML_NAMES = (
    ("H200", "h200"), ("H100 80GB HBM3", "h100"), ("H100 SXM", "h100"), ("B200", "b200"),
)  # fmt: skip


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
        near = difflib.get_close_matches(key, known_devices(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DeviceError(
            f"unknown device {key!r}; known: {', '.join(known_devices())}, or auto{hint}"
        )
    return Device(key=key, fingerprint=key, **_MODELS[key])


def device_to_judge_on(key: str = "auto") -> Device:
    """Like `get_device`, but the key of the GPU that is here means that board (`detect`).

    Raises:
        DeviceError: see `get_device`.
    """
    model = get_device(key)
    if key in ("auto", "cpu") or _gpu() is None:
        return model
    here = detect()
    return here if here.key == key else model


def detect() -> Device:
    """The model of the first visible NVIDIA GPU, or of this CPU where there is none.

    Compute rates are at the highest clock that NVML reports for the board, if that is above the one
    that the model's rates hold at (an H200 may run at 1,980 MHz, its datasheet's rates are for
    1,830): a kernel at full boost must not beat a bound.

    Raises:
        DeviceError: there is a GPU that no model describes and none can be derived for.
    """
    gpu = _gpu()
    if gpu is None:
        return calibrate_cpu()
    for part, key in _NVML_NAMES:
        if part in gpu.name:
            model = get_device(key)
            if gpu.max_sm_clock_mhz <= (model.sm_clock_mhz or 0):
                return model
            return model.at_clock(gpu.max_sm_clock_mhz).model_copy(update={"key": key})
    return derive(gpu)


def calibrate_cpu(*, force: bool = False) -> Device:
    """The CPU at hand as a device model: measured once, in a few seconds, and cached.

    See `sol_gym.calibration`. Loads torch where it has to measure.

    Args:
        force: measure again, and keep the better of the old figures and the new.
    """
    from .calibration import calibrated_cpu

    return calibrated_cpu(force=force)


# -- GPUs without a model -------------------------------------------------------------------------


class GpuProperties(NamedTuple):
    """What a GPU says about itself."""

    name: str
    compute_capability: tuple[int, int] | None = None
    cores: int = 0
    """FP32 units on all SMs."""
    max_sm_clock_mhz: int = 0
    max_memory_clock_mhz: int = 0
    memory_bus_bits: int = 0
    memory_bytes: int = 0


def derive(gpu: GpuProperties) -> Device:
    """A model made of a GPU's properties: units per SM times SMs times clock, and the memory bus.

    Raises:
        DeviceError: the architecture is not one whose units are known here.
    """
    architecture = _ARCHITECTURES.get(gpu.compute_capability or (0, 0))
    if architecture is None or not gpu.cores or not gpu.max_memory_clock_mhz:
        capability = ".".join(map(str, gpu.compute_capability or ("unknown",)))
        raise DeviceError(
            f"no device model for {gpu.name!r} (compute capability {capability}), and none can be "
            "derived; add its datasheet's figures to sol_gym/device.py (_MODELS and _NVML_NAMES) "
            f"or use --device cpu; known: {', '.join(known_devices())}"
        )
    assert gpu.compute_capability is not None
    sms = gpu.cores // architecture.fp32
    key = "-".join(gpu.name.lower().replace("nvidia", "").split())
    return Device(
        key=key,
        name=gpu.name,
        compute_capability=gpu.compute_capability,
        sm_count=sms,
        sm_clock_mhz=gpu.max_sm_clock_mhz,
        peak_flops=_peaks(gpu.compute_capability, sms, gpu.max_sm_clock_mhz),
        sfu_ops=16e6 * sms * gpu.max_sm_clock_mhz,
        # Double data rate: two transfers a clock.
        bandwidth_bytes_per_s=2e6 * gpu.max_memory_clock_mhz * gpu.memory_bus_bits / 8,
        l2_bytes=architecture.l2_bytes,
        shared_bytes_per_sm=architecture.shared_bytes,
        register_bytes_per_sm=256 * 1024,
        memory_bytes=gpu.memory_bytes,
        fingerprint=key,
        sources={
            "peak_flops": "derived: units per SM of the architecture x SMs x maximum clock",
            "bandwidth_bytes_per_s": "derived: 2 x memory clock x bus width",
        },
    )


# -- NVML -----------------------------------------------------------------------------------------


def _gpu() -> GpuProperties | None:
    """The first visible GPU; None where there is none, or no NVML to ask."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return None
        handle = _handle(0)
        name = pynvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else str(name)
        with contextlib.suppress(pynvml.NVMLError):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            return GpuProperties(
                name=name,
                compute_capability=(major, minor),
                cores=pynvml.nvmlDeviceGetNumGpuCores(handle),
                max_sm_clock_mhz=pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
                max_memory_clock_mhz=pynvml.nvmlDeviceGetMaxClockInfo(
                    handle, pynvml.NVML_CLOCK_MEM
                ),
                memory_bus_bits=pynvml.nvmlDeviceGetMemoryBusWidth(handle),
                memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            )
        return GpuProperties(name)
    return None


def _handle(index: int) -> Any:
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",")[index].strip() if visible else str(index)
    if chosen.startswith(("GPU-", "MIG-")):
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

        handle = nvml_handle(index)
        state["sm_clock_mhz"] = int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        bad = 0
        for name in _THROTTLING:
            bad |= getattr(pynvml, name, 0)
        state["throttled"] = bool(reasons & bad)
        setting = getattr(pynvml, "nvmlClocksThrottleReasonApplicationsClocksSetting", 0)
        state["locked"] = bool(reasons & setting)
    return state


@cache
def nvml_handle(index: int) -> Any:
    """NVML's handle of a GPU, by its index as CUDA counts; raises `pynvml.NVMLError`."""
    import pynvml

    pynvml.nvmlInit()
    return _handle(index)
