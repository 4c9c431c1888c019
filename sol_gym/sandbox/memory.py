"""The judge's memory: the arena that workers see, its layout, poison, and outputs mapped back.

The arena holds, per argument, a block with one slot a set: inputs first, then the outputs that
candidates with destination passing write. Slots are aligned as a tensor of one's own would be
(torch's allocator puts large tensors at 2 MiB offsets). At least 256 bytes of NaN pattern lie
between slots, so that a vector load past the end reads no neighbour.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InfrastructureError
from ..problem import Problem, TensorArg, Workload
from .worker import cuda, wire

_LARGE, _LARGE_ALIGN, _SMALL_ALIGN = 1 << 20, 2 << 20, 4096
_TAIL = 256
_GROWTH_PERCENT = 125
_NAN_BYTE = 0xFF
"""Repeated, it is NaN in every float format used here (E2M1 has none and gets a random byte)."""
_BAD_HANDLE = {cuda.INVALID_VALUE, cuda.INVALID_CONTEXT, cuda.MAP_FAILED, cuda.INVALID_HANDLE}
_FLOATS_WITH_NAN = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


@dataclass(frozen=True)
class Slot:
    """Where one argument's sets lie in the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    stride: int
    nbytes: int

    def view(self, arena: torch.Tensor, n: int) -> torch.Tensor:
        """The first `n` sets as one strided tensor [n, *shape]."""
        dtype = getattr(torch, self.dtype)
        block = arena[self.offset : self.offset + n * self.stride].view(n, self.stride)
        rows = block[:, : self.nbytes]
        typed = rows.view(dtype) if self.nbytes else rows.view(torch.uint8).to(dtype)
        return typed.view(n, *self.shape)

    def one(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """Set `index` as a contiguous tensor of `shape`."""
        start = self.offset + index * self.stride
        return arena[start : start + self.nbytes].view(getattr(torch, self.dtype)).view(self.shape)

    def raw(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """The bytes of set `index`."""
        start = self.offset + index * self.stride
        return arena[start : start + self.nbytes]

    def message(self) -> dict[str, Any]:
        """For the worker's `bind`."""
        return {
            "name": self.name, "scalar": False, "shape": list(self.shape), "dtype": self.dtype,
            "offset": self.offset, "stride": self.stride, "bytes": self.nbytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where `n` sets of a workload's tensors lie: offsets of inputs from the arena's start, of outputs
    from the end of the inputs."""

    n: int
    inputs: dict[str, Slot]
    outputs: dict[str, Slot]
    input_bytes: int
    output_bytes: int

    @classmethod
    def plan(cls, problem: Problem, workload: Workload, n: int) -> Layout:
        """Lay out `n` sets of the workload's tensors."""

        def place(specs: dict[str, TensorArg]) -> tuple[dict[str, Slot], int]:
            slots, offset = {}, 0
            for name, spec in specs.items():
                stride = slot_bytes(spec)
                dtype = "float4_e2m1fn_x2" if spec.dtype == "float4_e2m1" else spec.dtype
                offset = _aligned(offset, _alignment(spec))
                slots[name] = Slot(name, spec.shape, dtype, offset, stride, spec.nbytes)
                offset += stride * n
            return slots, offset

        inputs, input_bytes = place(problem.tensors(workload))
        outputs, output_bytes = place(problem.outputs(workload))
        return cls(n, inputs, outputs, _aligned(input_bytes, _LARGE_ALIGN), output_bytes)


def slot_bytes(spec: TensorArg) -> int:
    """Bytes one set of an argument takes in the arena."""
    return _aligned(spec.nbytes + _TAIL, _alignment(spec))


def _alignment(spec: TensorArg) -> int:
    return _LARGE_ALIGN if spec.nbytes >= _LARGE else _SMALL_ALIGN


def _aligned(value: int, step: int) -> int:
    return -(-value // step) * step


class Poison:
    """What outputs hold before a batch: NaN where the format has one, else a secret byte."""

    def __init__(self) -> None:
        self._secret = secrets.randbelow(200) + 17

    def byte(self, dtype: str) -> int:
        """The byte value for an output of `dtype`. For bool it must be a legal value."""
        if dtype == "bool":
            return self._secret & 1
        return _NAN_BYTE if dtype in _FLOATS_WITH_NAN else self._secret


class HostArena:
    """Shared memory for a worker on the CPU: an anonymous memory file of its own."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("sol_gym_arena")
        self.bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8)

    def ensure(self, nbytes: int) -> dict[str, Any] | None:
        """Grow to at least `nbytes`; a message for the worker, which must map anew if it grew.

        The worker must have let go of the old memory before.
        """
        if nbytes <= self.bytes.numel():
            return None
        nbytes = -(-nbytes * _GROWTH_PERCENT // 100 // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)  # type: ignore[arg-type]
        return {"cmd": "arena", "bytes": nbytes}

    def attach(self) -> dict[str, Any] | None:
        """What a fresh worker must be told to map the arena as it is."""
        return {"cmd": "arena", "bytes": self.bytes.numel()} if self.bytes.numel() else None

    def close(self) -> None:
        """Release the memory."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)


class DeviceArena:
    """Device memory owned by the judge, kept from evaluation to evaluation, mapped by workers.

    It is an allocation of its own, so that nothing else of the judge is in what a worker maps, and
    it is overwritten before the next worker can see it.
    """

    fd: int | None = None

    def __init__(self) -> None:
        self.bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._pointer = 0
        self._handle = ""

    def ensure(self, nbytes: int) -> dict[str, Any] | None:
        """As `HostArena.ensure`; raises `InfrastructureError` if the device is out of memory."""
        if nbytes <= self.bytes.numel():
            return None
        self._free()
        try:
            self._pointer = cuda.allocate(nbytes)
            self._handle = cuda.export(self._pointer).hex()
        except cuda.CudaError as error:
            raise InfrastructureError(
                f"the judge cannot get {nbytes / 2**30:.1f} GiB of device memory: {error}"
            ) from None
        self.bytes = cuda.as_bytes(self._pointer, nbytes)
        cuda.fill(self._pointer, _NAN_BYTE, nbytes)
        return self.attach()

    def attach(self) -> dict[str, Any] | None:
        """What a fresh worker must be told to map the arena as it is."""
        if not self._pointer:
            return None
        torch.cuda.synchronize()  # Scrubbing must be over before anybody can look.
        return {"cmd": "arena", "handle": self._handle, "bytes": self.bytes.numel()}

    def scrub(self) -> None:
        """Overwrite everything: what one candidate wrote, no other may read."""
        if self._pointer:
            cuda.fill(self._pointer, _NAN_BYTE, self.bytes.numel())

    def _free(self) -> None:
        if self._pointer:
            self.scrub()
            torch.cuda.synchronize()
            self.bytes = torch.empty(0, dtype=torch.uint8)
            cuda.free(self._pointer)
            self._pointer = 0

    def close(self) -> None:
        """Overwrite and release the memory."""
        self._free()


class MappedOutputs:
    """Outputs that lie in the worker's device memory, mapped into the judge."""

    def __init__(
        self, handles: dict[int, bytes], places: list[list[tuple[int, int]]], slots: list[Slot]
    ):
        """As `replies.captured` gives them; raises `wire.ProtocolError` if that is the handles' fault."""
        self._segments: dict[int, int] = {}
        self._views: list[list[torch.Tensor]] = []
        try:
            for base, handle in handles.items():
                self._segments[base] = cuda.open_handle(handle)
            for row in places:
                views = []
                for (base, offset), slot in zip(row, slots, strict=True):
                    # The size is asked of the driver, not of the worker.
                    _, size = cuda.address_range(self._segments[base])
                    if offset > size - slot.nbytes:
                        raise wire.ProtocolError("an output lies outside its allocation")
                    views.append(cuda.as_bytes(self._segments[base] + offset, slot.nbytes))
                self._views.append(views)
        except cuda.CudaError as error:
            self.close()
            # The handles are the worker's word; a device out of memory or in disorder is not.
            kind = wire.ProtocolError if error.code in _BAD_HANDLE else InfrastructureError
            raise kind(f"outputs cannot be mapped: {error}") from None
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self._views)

    def raw(self, index: int) -> list[torch.Tensor]:
        """The bytes of call `index`'s outputs."""
        return self._views[index]

    def close(self) -> None:
        """Unmap."""
        self._views = []
        torch.cuda.synchronize()
        for pointer in self._segments.values():
            cuda.close_handle(pointer)
        self._segments = {}
