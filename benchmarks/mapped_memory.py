"""How fast a kernel reads and writes memory that another process allocated, by the allocation's size.

    python benchmarks/mapped_memory.py

One process allocates and exports; a fresh one a row maps the memory, captures 32 calls of an RMSNorm
(520128 rows of 256 bytes) on distinct sets in a CUDA graph and prints milliseconds a call for inputs
and outputs of its own and in the mapping. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
from typing import Any

import torch
from plain_calls import load_run

from sol_gym.sandbox.worker import cuda

_KERNEL = "fib_021_rmsnorm_h128.py"
_ROWS, _SETS, _MIB = 520128, 64, 1 << 20
_BYTES = _ROWS * 128 * 2
_DENSE = -(-(_BYTES + 256) // 512) * 512
_SPACED = -(-(_BYTES + 256) // (2 * _MIB)) * 2 * _MIB
CASES = [
    ("slots at 512 bytes, size a multiple of 512", _DENSE, _SETS * _DENSE + 1536),
    ("slots at 512 bytes, whole 2 MiB", _DENSE, (_SETS * _DENSE // (2 * _MIB) + 1) * 2 * _MIB),
    ("slots at 2 MiB, size a multiple of 512", _SPACED, _SETS * _SPACED + 1536),
    ("slots at 2 MiB, 64 KiB more than whole 2 MiB", _SPACED, _SETS * _SPACED + (64 << 10)),
    ("slots at 2 MiB, whole 2 MiB", _SPACED, _SETS * _SPACED),
]


def allocate_exactly(nbytes: int) -> int:
    """Device address of `nbytes`, not rounded as `cuda.allocate` does."""
    pointer = ctypes.c_uint64()
    cuda._check(cuda._lib().cuMemAlloc_v2(ctypes.byref(pointer), nbytes), f"cuMemAlloc({nbytes})")
    return pointer.value


def map_and_measure(title: str, handle: str, stride: int) -> None:
    """The second process: print a row."""
    run = load_run(_KERNEL)
    weight = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    memory = cuda.as_bytes(cuda.open_handle(bytes.fromhex(handle)), _SETS * stride)
    mapped = [
        memory[i * stride : i * stride + _BYTES].view(torch.bfloat16).view(_ROWS, 128)
        for i in range(_SETS)
    ]
    half = _SETS // 2
    own = [torch.randn(_ROWS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(_SETS)]

    def milliseconds(inputs: list[Any], outputs: list[Any]) -> float:
        run(inputs[0], weight, outputs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x, y in zip(inputs, outputs, strict=True):
                run(x, weight, y)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / len(inputs))
        return statistics.median(times)

    first, second = slice(None, half), slice(half, None)
    print(
        f"{title:46s} own to own {milliseconds(own[first], own[second]):.4f}  "
        f"mapped to own {milliseconds(mapped[first], own[second]):.4f}  "
        f"own to mapped {milliseconds(own[first], mapped[first]):.4f}  "
        f"mapped to mapped {milliseconds(mapped[first], mapped[second]):.4f}",
        flush=True,
    )


def main() -> None:
    """One child a case."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    if len(sys.argv) > 1:
        map_and_measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        return
    for title, stride, nbytes in CASES:
        pointer = allocate_exactly(nbytes)
        cuda.as_bytes(pointer, _SETS * stride).view(torch.bfloat16).normal_()
        torch.cuda.synchronize()
        handle = cuda.export(pointer).hex()
        subprocess.run([sys.executable, __file__, title, handle, str(stride)], check=True)
        cuda.free(pointer)


if __name__ == "__main__":
    main()
