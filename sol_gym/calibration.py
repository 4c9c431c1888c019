"""Measuring the CPU at hand: matrix-product rates, and bandwidth by size of the working set.

A bound must not be beatable, and a measurement can only fall short of what a machine can do. So the
model takes the best of many measurements times a headroom: `HEADROOM`, and `CACHE_HEADROOM` for
working sets that live in caches, where torch's call overhead hides part of the bandwidth. On a busy
machine all cores together never get to work undisturbed, so one core is also timed by its own
clock, which does not count what other processes took; its rate times the cores is what they could
do (for traffic from memory, which cores share, times two).

The result is kept under the cache folder with a fingerprint of the machine; a file that cannot be
read or does not fit is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .device import Device
from .paths import cache_dir, write_atomically

HEADROOM = 1.25
"""Factor on measured peaks."""
CACHE_HEADROOM = 2.0
"""Factor on bandwidth measured within the caches."""

_VERSION = 3
"""Of the way of measuring; a new one makes old files stale."""
_PRODUCT_S, _TRAFFIC_S = 0.12, 0.06
"""Time for one measurement."""
_WORKING_SETS = tuple(2**k for k in (16, 18, 20, 22, 24, 26, 28))
_DEFAULT_CACHE = 32 << 20


def calibrated_cpu(*, force: bool = False) -> Device:
    """The CPU at hand as a device model, from the cache or measured.

    Args:
        force: measure again, and keep the better of the old figures and the new, because a busy
            machine looks slower than it is. Delete the file (`sol-gym doctor` names the folder) to
            start over.
    """
    fingerprint = machine_fingerprint()
    file = cache_dir() / f"cpu-{fingerprint}.json"
    known = None
    with contextlib.suppress(OSError, ValidationError, ValueError):
        known = Device.model_validate_json(file.read_text())
    if known and not force:
        return known
    device = measure_cpu()
    if known:
        device = best_of(known, device)
    with contextlib.suppress(OSError):  # where nothing can be kept, every process measures
        write_atomically(file, device.model_dump_json(indent=1))
    return device


def machine_fingerprint() -> str:
    """12 hex digits over what the figures depend on: processor, usable cores, memory, torch."""
    facts = [
        _VERSION,
        _cpu_name(),
        usable_cores(),
        os.sysconf("SC_PHYS_PAGES") // 2**18,
        platform.machine(),
    ]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts.append(importlib.metadata.version("torch"))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def best_of(old: Device, new: Device) -> Device:
    """The new model with every rate at least the old one's."""
    before = dict(old.cache_levels)
    return new.model_copy(
        update={
            "peak_flops": {
                k: max(v, old.peak_flops.get(k, 0.0)) for k, v in new.peak_flops.items()
            },
            "bandwidth_bytes_per_s": max(old.bandwidth_bytes_per_s, new.bandwidth_bytes_per_s),
            "cache_levels": tuple(
                (size, max(rate, before.get(size, 0.0))) for size, rate in new.cache_levels
            ),
        }
    )


def measure_cpu() -> Device:
    """A fresh measurement, whatever is in the cache. Takes a few seconds on an idle machine."""
    import torch

    cores, last_level = usable_cores(), _last_level_cache()
    threads = torch.get_num_threads()
    try:
        peak = {
            "fp32": _product_rate(torch.float32, cores) * HEADROOM,
            "bf16": _product_rate(torch.bfloat16, cores) * HEADROOM,
            "fp64": _product_rate(torch.float64, cores) * HEADROOM,
        }
        rates = [(size, _bandwidth(size, cores, last_level)) for size in _WORKING_SETS]
    finally:
        torch.set_num_threads(threads)
    # A kernel may compute low precision in whatever unit is fastest.
    fastest = max(peak["fp32"], peak["bf16"])
    peak |= dict.fromkeys(("bf16", "fp16", "tf32", "fp8", "nvfp4"), fastest)
    levels = _levels(rates, last_level)
    said = f"best of repeated measurements on this machine, times {HEADROOM}"
    return Device(
        key="cpu",
        name=_cpu_name(),
        sm_count=cores,
        peak_flops=peak,
        bandwidth_bytes_per_s=levels[-1][1],
        cache_levels=levels,
        l2_bytes=last_level,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        calibrated=True,
        fingerprint=f"cpu-{machine_fingerprint()}",
        sources={
            "peak_flops": f"calibrated: square matrix products, {said}",
            "bandwidth_bytes_per_s": "calibrated: copy, fill, sum and scale of 256 MiB, " + said,
            "cache_levels": f"calibrated: the same for smaller working sets, times "
            f"{CACHE_HEADROOM} up to twice the last-level cache",
            "l2_bytes": "sysfs",
        },
    )


def _levels(rates: list[tuple[int, float]], last_level: int) -> tuple[tuple[int, float], ...]:
    """Roofs from measured bandwidths: with headroom, never rising with the working set.

    Between two sizes the roof is the smaller one's, which is the higher; below the first it is the
    first's.
    """
    levels = []
    highest = 0.0
    for size, rate in reversed(rates):
        rate *= CACHE_HEADROOM if size <= 2 * last_level else HEADROOM
        highest = max(highest, rate)
        levels.append((size, highest))
    return tuple(reversed(levels))


# -- Measurements ---------------------------------------------------------------------------------


def _product_rate(dtype: Any, cores: int) -> float:
    """FLOP/s of square matrix products: the best core times the cores, or all of them together."""
    import torch

    best = 0.0
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for size in (256, 512, 1024):
            a = torch.ones(size, size, dtype=dtype)
            multiply = partial(torch.mm, a, a)
            seconds = _least_seconds(multiply, _PRODUCT_S, of_processor=threads == 1)
            best = max(best, 2 * size**3 / seconds * cores / threads)
            if seconds > _PRODUCT_S / 4:
                break  # no fast product for this type: larger ones only take longer
    return best


def _bandwidth(working_set: int, cores: int, last_level: int) -> float:
    """Bytes/s, read and written, of the fastest simple operation on a working set."""
    import torch

    elements = working_set // 4
    whole = torch.ones(elements)
    source, target = whole[: elements // 2], whole[elements // 2 :]
    operations: tuple[Callable[[], Any], ...] = (
        lambda: target.copy_(source),
        lambda: whole.fill_(1.0),
        lambda: whole.sum(),
        lambda: torch.mul(source, 0.5, out=target),
    )
    best = 0.0
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        seconds = min(_least_seconds(o, _TRAFFIC_S, of_processor=threads == 1) for o in operations)
        alone = cores if working_set <= last_level else min(cores, 2)
        best = max(best, 4 * elements / seconds * (alone if threads == 1 else 1))
    return best


def _least_seconds(
    call: Callable[[], Any], budget_s: float, *, of_processor: bool = False
) -> float:
    """The shortest of as many calls as fit; one thread's may also be read off the processor."""
    call()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        wall, used = time.perf_counter(), time.thread_time()
        call()
        used = time.thread_time() - used
        best = min(best, time.perf_counter() - wall)
        if of_processor and used > 1e-4:  # shorter ones drown in that clock's own cost
            best = min(best, used)
    return best


# -- About the machine ----------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores this process may run on, by affinity and by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
            sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes, default=_DEFAULT_CACHE)
