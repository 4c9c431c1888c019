"""What differs between a CPU and a GPU for the judge; the protocol above it is the same."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from ..device import Device, gpu_state, nvml_handle
from ..errors import InfrastructureError
from .memory import DeviceArena, HostArena
from .worker import cuda

_GIB = 1 << 30
_FIRST_ARENA_BYTES = 64 << 20
"""Fresh workers map this much before they load anything; most problems need no more."""
_PROBE_S = 6e-3
_BUSY_FACTOR, _BUSY_PROBES, _IDLE_PROBES = 1.5, 3, 20
"""The device is busy if so many probes in a row each take so many times what an idle one takes, and
idle again only if many in a row do not."""
_UNSTEADY_FACTOR = 1.25


class Backend:
    """A device the judge can measure on."""

    kind: str
    poll_sleep_s: float
    """Pause between looks at a flag: 0 spins."""
    batch_s: float
    """A batch lasts at least this long, if enough sets fit."""
    max_sets: int
    idle_check: bool | str = True
    """Whether the device is looked at before batches, to see that nobody works; or why not."""

    def __init__(self, device: Device):
        self.device = device
        self.torch_device = torch.device(self.kind)

    def arena(self) -> Any:
        """Memory that workers map."""
        raise NotImplementedError

    def release_arena(self, arena: Any) -> None:
        """Give an evaluation's arena back."""
        raise NotImplementedError

    def memory_cap(self) -> int:
        """Bytes the arena may take."""
        raise NotImplementedError

    def cached_bytes(self) -> int:
        """Device memory that the judge's allocator holds, in use or not; 0 where it is the host's."""
        return 0

    def release_cached(self, keep_bytes: int = 8 * _GIB) -> None:
        """Return cached memory to the driver if it is more than `keep_bytes`, overwritten first.

        No worker may run meanwhile.
        """

    def flush(self) -> None:
        """Push the inputs out of the caches."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the judge's own work is done."""

    def busy(self) -> bool:
        """Whether work of other processes runs on the device while they should be idle.

        On a CPU a stopped process cannot work, so there is nothing to look for.
        """
        return False

    def idle_again(self, timeout_s: float) -> bool:
        """Whether the device comes to rest, now that the worker is dead, and nobody else is on it."""
        return True

    def state(self) -> dict[str, Any]:
        """Clock and throttling now: {"sm_clock_mhz": int | None, "throttled": bool, "locked": bool}."""
        return {"sm_clock_mhz": None, "throttled": False, "locked": False}

    def versions(self) -> dict[str, str]:
        """The software stack, for provenance."""
        import triton

        return {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def build_stack(self) -> dict[str, Any]:
        """What a compiled artifact depends on besides its source."""
        return {"torch": torch.__version__, "python": platform.python_version(), "kind": self.kind,
                "machine": platform.machine()}  # fmt: skip

    def arch_flags(self) -> list[str]:
        """nvcc's target flags."""
        return []

    def environment(self) -> dict[str, str]:
        """Variables for workers."""
        return {}

    def worker_cpus(self) -> list[int]:
        """Cores that workers may use."""
        return sorted(os.sched_getaffinity(0))

    def close(self) -> None:
        """Release everything held."""


class CpuBackend(Backend):
    """Workers on the same cores as the judge, which therefore sleeps while it waits."""

    kind = "cpu"
    poll_sleep_s = 20e-6
    batch_s = 10e-3
    max_sets = 64

    def __init__(self, device: Device):
        super().__init__(device)
        # Half of the cores: with all of them, every small operation waits for a thread that a busy
        # machine does not run (comparing half a million elements took 0.36 s instead of 0.02 s).
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
        self._flush_buffer: torch.Tensor | None = None

    def arena(self) -> HostArena:
        return HostArena()

    def release_arena(self, arena: HostArena) -> None:
        arena.close()

    def memory_cap(self) -> int:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(total // 8, 4 * _GIB)

    def flush(self) -> None:
        if self._flush_buffer is None:
            size = min(2 * max(self.device.l2_bytes, 16 << 20), 256 << 20)
            self._flush_buffer = torch.empty(size, dtype=torch.uint8)
        self._flush_buffer.add_(1)

    def environment(self) -> dict[str, str]:
        return {"TRITON_INTERPRET": "1"}


class CudaBackend(Backend):
    """One NVIDIA GPU. The judge spins while it waits: microseconds matter and cores are many."""

    kind = "cuda"
    poll_sleep_s = 0.0
    batch_s = 10e-3
    max_sets = 256

    def __init__(self, device: Device, lock_clock_mhz: int | None = None):
        super().__init__(device)
        torch.cuda.init()
        torch.cuda.set_device(0)
        # The reference is float32 where it says float32 (docs/design.md, Correctness).
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._flush_buffer = torch.empty(2 * device.l2_bytes, dtype=torch.uint8, device="cuda")
        self._arena = DeviceArena()
        self._arena.ensure(_FIRST_ARENA_BYTES)
        self._capability = torch.cuda.get_device_capability(0)
        self._worker_cpus = _keep_a_core()
        self._locked = False
        if lock_clock_mhz is not None:
            self._lock_clock(lock_clock_mhz)
        self._probe_graph: torch.cuda.CUDAGraph | None = None
        self._probe_s = 0.0
        self.idle_check = self._learn_idle_time()

    def arena(self) -> DeviceArena:
        return self._arena

    def release_arena(self, arena: DeviceArena) -> None:
        arena.scrub()
        self.release_cached()

    def memory_cap(self) -> int:
        return int(torch.cuda.get_device_properties(0).total_memory * 0.3)

    def flush(self) -> None:
        self._flush_buffer.add_(1)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        state = gpu_state(0)
        return state | {"locked": True} if self._locked else state

    # -- whether anybody else is at work --------------------------------------------------------

    def busy(self) -> bool:
        """Whether another process's kernels take turns with the judge's.

        Stopping a process (SIGSTOP) does not stop its kernels: a persistent one keeps running and
        could watch inputs arrive. Contexts share a GPU in time slices of about 2 ms, so a piece of
        the judge's own work of three slices takes about twice as long while somebody else has
        work. Its time on an idle device was measured before the first worker existed.

        A slow device looks busy too (a clock held down by heat). So this is a suspicion; what it
        takes to make it more is in `Calls._accuse` and in the judge.
        """
        return self.idle_check is True and all(
            self._probe() > _BUSY_FACTOR * self._probe_s for _ in range(_BUSY_PROBES)
        )

    def idle_again(self, timeout_s: float) -> bool:
        """See `Backend.idle_again`: many quick probes in a row, and NVML knows of no other process."""
        deadline = time.monotonic() + timeout_s
        row = 0
        while time.monotonic() < deadline:
            row = row + 1 if self._probe() <= _BUSY_FACTOR * self._probe_s else 0
            if row >= _IDLE_PROBES and _processes_on_gpu() <= 1:
                return True
        return False

    def _learn_idle_time(self) -> bool | str:
        """Prepare the probe and time it on the idle device; says why if it cannot be relied on."""
        if os.environ.get("SOL_GYM_IDLE_CHECK") == "0":
            return "off: SOL_GYM_IDLE_CHECK=0"
        self.flush()  # A kernel's first launch loads it, which a capture may not do.
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        writes = 1
        for _ in range(3):  # One write; as many as take the time wanted; again, with warm clocks.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(writes):
                    self._flush_buffer.add_(1)
            self._probe_graph = graph
            times = sorted(self._probe() for _ in range(_IDLE_PROBES))
            self._probe_s = times[0]
            writes = math.ceil(writes * _PROBE_S / max(self._probe_s, 1e-6))
        if times[-2] > _UNSTEADY_FACTOR * times[0]:  # One hiccup is allowed.
            return f"off: idle probes took {times[0] * 1e3:.1f} to {times[-2] * 1e3:.1f} ms"
        return True

    def _probe(self) -> float:
        """Seconds that the probe takes by the device's clock: one launch, so that a busy CPU cannot
        make it look long."""
        assert self._probe_graph is not None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        self._probe_graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _lock_clock(self, mhz: int) -> None:
        """Hold the SM clock at `mhz` until `close`. Only ever done when it was asked for."""
        import pynvml

        try:
            pynvml.nvmlDeviceSetGpuLockedClocks(nvml_handle(0), mhz, mhz)
        except pynvml.NVMLError as error:
            raise InfrastructureError(
                f"the SM clock cannot be locked to {mhz} MHz: {error}; locking needs the right to set "
                "clocks (usually root); leave SOL_GYM_LOCK_CLOCK_MHZ unset to run unlocked"
            ) from None
        self._locked = True

    def _unlock_clock(self) -> None:
        import pynvml

        if self._locked:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlDeviceResetGpuLockedClocks(nvml_handle(0))
            self._locked = False

    def worker_cpus(self) -> list[int]:
        return self._worker_cpus

    def cached_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def release_cached(self, keep_bytes: int = 8 * _GIB) -> None:
        # The allocator cannot overwrite what it has cached, so everything free on the device is
        # taken once and filled.
        if self.cached_bytes() <= keep_bytes:
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks = []
        size = torch.cuda.mem_get_info()[0]
        while size > 64 << 20:
            try:
                pointer = cuda.allocate(size)
            except cuda.CudaError:
                size = int(size * 0.9)
                continue
            cuda.fill(pointer, 0xFF, size)
            blocks.append(pointer)
            size = torch.cuda.mem_get_info()[0]
        torch.cuda.synchronize()
        for pointer in blocks:
            cuda.free(pointer)

    def versions(self) -> dict[str, str]:
        return super().versions() | {"cuda": str(torch.version.cuda), "driver": _driver_version()}

    def build_stack(self) -> dict[str, Any]:
        return super().build_stack() | {
            "capability": self._capability,
            "cuda": str(torch.version.cuda),
        }

    def arch_flags(self) -> list[str]:
        major, minor = self._capability
        suffix = "a" if major >= 9 else ""  # Architecture-specific instructions (wgmma, tcgen05).
        return [f"-gencode=arch=compute_{major}{minor}{suffix},code=sm_{major}{minor}{suffix}"]

    def environment(self) -> dict[str, str]:
        major, minor = self._capability
        return {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}

    def close(self) -> None:
        self._unlock_clock()
        self._arena.close()


def _keep_a_core() -> list[int]:
    """Pin this thread to one physical core and return the others, which are the workers'.

    Judge and worker both spin while a short series is timed; on two hardware threads of one core
    they would slow each other down, now and then.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 4:
        return cpus
    mine = {cpus[-1]}
    with contextlib.suppress(OSError, ValueError):
        text = Path(
            f"/sys/devices/system/cpu/cpu{cpus[-1]}/topology/thread_siblings_list"
        ).read_text()
        for part in text.strip().split(","):
            low, _, high = part.partition("-")
            mine |= set(range(int(low), int(high or low) + 1))
    others = [cpu for cpu in cpus if cpu not in mine]
    if not others:
        return cpus
    os.sched_setaffinity(0, {cpus[-1]})
    return others


def _processes_on_gpu() -> int:
    """How many processes have a context on the GPU, the judge included; 0 where NVML cannot say."""
    with contextlib.suppress(Exception):
        import pynvml

        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(0)))
    return 0


def _driver_version() -> str:
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    return "unknown"


def backend_for(device: Device, lock_clock_mhz: int | None = None) -> Backend:
    """The backend of a device model that is present on this machine.

    Args:
        lock_clock_mhz: hold a GPU's SM clock there while the backend lives.

    Raises:
        InfrastructureError: the clock cannot be locked.
    """
    if device.key != "cpu":
        return CudaBackend(device, lock_clock_mhz)
    if lock_clock_mhz is not None:
        raise InfrastructureError("only a GPU's clock can be locked; this device is the CPU")
    return CpuBackend(device)
