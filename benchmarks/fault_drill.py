"""A few hundred evaluations of which most go wrong; nothing may be left behind, and no good kernel
may suffer (docs/security.md).

    python benchmarks/fault_drill.py [--device auto|cpu|h200] [--count 200] [--seed 0] [--time-limit S]

Garbage, syntax errors, crashes, hangs, leaks, forks and daemons, memory hogs, floods of output,
broken protocols and, on a GPU, faults of the device, in random order among good kernels. Checked
after every evaluation: the status is one that this kind of fault may have; no process, scratch
folder or mapped memory file is left. Checked at the end, against the state after a warm-up: open
descriptors, memory and threads of the judge, processes, temporary files, shared memory, device memory.
The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from sol_gym.device import get_device
from sol_gym.evaluation import Status
from sol_gym.problem import (
    AxisConst,
    AxisVar,
    Definition,
    Problem,
    RandomInput,
    TensorSpec,
    Workload,
)
from sol_gym.sandbox.judge import Judge
from sol_gym.sandbox.limits import Limits
from sol_gym.sandbox.request import Request
from sol_gym.sandbox.timing import Plan
from sol_gym.sandbox.worker.isolation import descendants
from sol_gym.solution import Solution

GOOD = """
import torch

def run(x, weight):
    wide = x.float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * r * weight.float()).to(x.dtype)
"""
_CPP = '#include <cstdint>\n#include <cstdlib>\n#include <csignal>\n#include <unistd.h>\nextern "C" void run(const void* x, const void* w, void* y, int64_t n) {{ {body} }}\n'
_TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def stray(y):
    {body}

def run(x, weight):
    y = torch.empty_like(x)
    stray[(1,)](y)
    return y
"""
_S = Status
_BAD = {_S.RUNTIME_ERROR, _S.COMPILE_ERROR}


@dataclass(frozen=True)
class Case:
    """One kind of solution, and which statuses it may end with."""

    kind: str
    source: str
    allowed: frozenset[Status]
    limit_s: float = 60.0


def case(kind: str, source: str, *allowed: Status, limit_s: float = 60.0) -> Case:
    """A case; `source` that does not define `run` is put before a good kernel."""
    whole = source if "run(" in source else source + GOOD
    return Case(kind, whole, frozenset(allowed), limit_s)


def good_cases(on_gpu: bool) -> list[Case]:
    """Honest kernels; every one of them must pass."""
    passing = "\ndef run(x, weight, y):\n    y.copy_(honest(x, weight))\n"
    cases = [
        case("good", GOOD, _S.PASSED),
        case("good", GOOD.replace("def run", "def honest") + passing, _S.PASSED),
        case("good", "print('hello')\n" + GOOD, _S.PASSED),
    ]
    threads = (
        "import threading\n" + GOOD.replace("def run", "def honest") + "\ndef run(x, weight):\n    out = []\n"
        "    t = threading.Thread(target=lambda: out.append(honest(x, weight)))\n    t.start()\n    t.join()\n    return out[0]\n"
    )  # fmt: skip
    return cases if on_gpu else [*cases, case("good", threads, _S.PASSED)]


def bad_cases(rng: random.Random, on_gpu: bool) -> list[Case]:
    """Every kind of fault once, with random parts drawn anew."""
    noise = "".join(chr(rng.randrange(32, 0x2FFF)) for _ in range(rng.randrange(1, 400)))
    hang_s = 6.0 if on_gpu else 2.5
    late = (_S.TIMEOUT, _S.RUNTIME_ERROR)
    wrong = (_S.INCORRECT_NUMERICAL, _S.INCORRECT_SHAPE, _S.INCORRECT_DTYPE, *_BAD)
    cases = [
        case("garbage", "x" + noise, *wrong),
        case("garbage", f"run = {rng.choice(['None', '42', 'len', 'int'])}  # run(", *wrong),
        case("garbage", "def run(*a):\n    return object()\n", *wrong),
        case("syntax error", "def run(x, weight:\n    return x\n", _S.COMPILE_ERROR),
        case("syntax error", "def run(x):\nreturn (\n", _S.COMPILE_ERROR),
        case("C++ error", _CPP.format(body="not C++ at all"), _S.COMPILE_ERROR),
        case("crash", _CPP.format(body="*(volatile int*)8 = 1;"), _S.RUNTIME_ERROR),
        case("crash", _CPP.format(body="abort();"), _S.RUNTIME_ERROR),
        case("crash", _CPP.format(body="_exit(0);"), _S.RUNTIME_ERROR),
        case("crash", "import ctypes\ndef run(x, weight):\n    ctypes.string_at(0)\n", _S.RUNTIME_ERROR),
        case("crash", "import os\ndef run(x, weight):\n    os.kill(os.getpid(), 9)\n", _S.RUNTIME_ERROR),
        case("crash", "raise SystemExit(0)\n", *_BAD),
        case("recursion", "def run(x, weight):\n    return run(x, weight)\n", _S.RUNTIME_ERROR),
        case("hang", "def run(x, weight):\n    while True:\n        pass\n", *late, limit_s=hang_s),
        case("hang", "import time\ntime.sleep(1000)\n", *late, _S.COMPILE_ERROR, limit_s=hang_s),
        case("hang", "import signal\nsignal.pthread_sigmask(0, range(1, 65))\ndef run(x, weight):\n    while True:\n        pass\n", *late, limit_s=hang_s),
        case("daemon", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\n", _S.PASSED),
        case("fork bomb", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n", *late, *_BAD, limit_s=hang_s),
        case("thread bomb", "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(1000,)).start()\n", *late, *_BAD, limit_s=hang_s),
        case("memory hog", "hoard = []\nwhile True:\n    hoard.append(b'x' * (8 << 20))\n", *_BAD),
        case("memory hog", "import mmap\nhoard = []\nwhile True:\n    hoard.append(mmap.mmap(-1, 8 << 20))\n    hoard[-1].write(b'x' * (8 << 20))\n", *_BAD),
        case("disk hog", "with open('big', 'wb') as f:\n    while True:\n        f.write(b'x' * (1 << 20))\n", *_BAD),
        case("descriptor hog", "import os\nheld = []\nwhile True:\n    held.append(os.dup(1))\n", *_BAD),
        case("leak", "import os, tempfile, mmap, multiprocessing.shared_memory as s\nleft = s.SharedMemory(create=True, size=1 << 20)\nopen(tempfile.mktemp(), 'w').write('x')\nos.memfd_create('left')\n", _S.PASSED),
        case("leak", "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.symlink('/', 'a/root')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\n", _S.PASSED),
        case("flood", "print('x' * (4 << 20))\n", _S.PASSED),
        case("flood", "import sys\ndef run(x, weight):\n    while True:\n        sys.stdout.write('x' * 65536)\n", *late, limit_s=hang_s),
        case("broken protocol", "import os\ndef run(x, weight):\n    for fd in range(3, 64):\n        try:\n            os.write(fd, os.urandom(64))\n        except OSError:\n            pass\n    return x\n", _S.REWARD_HACK, *late, limit_s=hang_s + 4),
        case("broken protocol", "import os\ndef run(x, weight):\n    os.closerange(3, 64)\n    return x\n", *late, limit_s=hang_s + 4),
        case("exception", "def run(x, weight):\n    raise ValueError('no')\n", _S.RUNTIME_ERROR),
        case("wrong", "def run(x, weight):\n    return x\n", _S.INCORRECT_NUMERICAL),
        case("wrong", "import torch\ndef run(x, weight):\n    return torch.zeros_like(x[:1])\n", _S.INCORRECT_SHAPE),
    ]  # fmt: skip
    if on_gpu:
        stray = _TRITON.format(body="tl.store(y + 100000000000, 1.0)")
        endless = _TRITON.format(
            body="v = tl.load(y)\n    while v == v:\n        v = tl.load(y, volatile=True) * 0.0\n    tl.store(y, v)"
        )
        hoard = "import torch\nhoard = []\nwhile True:\n    hoard.append(torch.empty(1 << 30, device='cuda'))\n"
        cases += [
            case("GPU fault", stray, _S.RUNTIME_ERROR),
            case("GPU hang", endless, *late, limit_s=8.0),
            case("GPU memory hog", hoard, *_BAD),
            case(
                "GPU leak", "import torch\nleft = torch.empty(1 << 28, device='cuda')\n", _S.PASSED
            ),
        ]
    return cases


@dataclass
class Row:
    """What came of one kind."""

    statuses: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: list[float] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Drill:
    """A judge in this process, and what is left behind around it."""

    def __init__(self, device_key: str, folder: Path):
        device = get_device(device_key)
        self.on_gpu = device.key != "cpu"
        self.name = device.name
        limits = Limits(
            memory_bytes=(8 if self.on_gpu else 1) << 30, scratch_bytes=64 << 20, tasks=256,
            file_bytes=1 << 30, open_files=1024,
        )  # fmt: skip
        plan = Plan(rounds=2, repeats=2, single_budget_s=0.002, max_asks=6)
        self.judge = Judge(device, cache=folder / "cache", limits=limits, plan=plan)
        self.problem = problem()
        self.leaks: list[str] = []

    def evaluate(self, it: Case, *, timing: bool) -> tuple[Status, str, float]:
        """Status, message and seconds of one case; then look around."""
        start = time.perf_counter()
        solution = Solution.from_text(it.source)
        outcome = self.judge.evaluate(
            Request(self.problem, solution, timing=timing, timeout_s=it.limit_s)
        )
        seconds = time.perf_counter() - start
        status = outcome.status
        if status is None:
            failing = [r.status for r in outcome.results if r.status is not Status.PASSED]
            status = failing[0] if failing else Status.PASSED
        message = outcome.message or next((r.message for r in outcome.results if r.message), "")
        self._look_around(it.kind)
        return status, message, seconds

    def _look_around(self, kind: str) -> None:
        zygote = self.judge.zygote._process.pid
        deadline = time.monotonic() + 5.0
        while descendants(zygote) and time.monotonic() < deadline:
            time.sleep(0.01)
        if left := descendants(zygote):
            self.leaks.append(f"after {kind}: processes {left}")
        if left_folders := list(self.judge.scratch.glob("eval-*")):
            self.leaks.append(f"after {kind}: folders {left_folders}")
        targets = [fd_target(fd) for fd in os.listdir("/proc/self/fd")]
        if mapped := [t for t in targets if "memfd:sol_gym" in t]:
            self.leaks.append(f"after {kind}: memory files {mapped}")

    def state(self) -> dict[str, Any]:
        """What must not grow."""
        gc.collect()
        ours = Path(tempfile.gettempdir())
        names = [str(path.relative_to(ours)) for path in ours.rglob("*")]
        state = {
            "open descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "processes": len(descendants(os.getpid())),
            "temporary files": sorted(name for name in names if not _ARTIFACT.match(name)),
            "shared memory": sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else [],
            "zygote descriptors": len(os.listdir(f"/proc/{self.judge.zygote._process.pid}/fd")),
            "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
            "memory MiB": resident_mib(os.getpid()),
            "zygote memory MiB": resident_mib(self.judge.zygote._process.pid),
        }  # fmt: skip
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
            state["device memory MiB"] = -(torch.cuda.mem_get_info()[0] >> 20)
        return state


_ARTIFACT = re.compile(r"cache/build/[0-9a-f]{24}(/|$)")
"""What a build leaves on purpose; a folder of any other name there is a copy that was not finished."""
_ALLOWED_GROWTH = {"memory MiB": 200, "zygote memory MiB": 64, "device memory MiB": 64}
"""Allocators keep some of what they once had."""


def grown(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is there now and was not before."""
    found = []
    for name, old in before.items():
        new = after[name]
        if isinstance(old, list):
            if more := sorted(set(new) - set(old)):
                found.append(f"{name}: {more}")
        elif new > old + _ALLOWED_GROWTH.get(name, 0):
            found.append(f"{name}: {old} before, {new} after")
    return found


def fd_target(fd: str) -> str:
    """What a descriptor of this process refers to."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def resident_mib(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) >> 10
    return 0


def problem() -> Problem:
    """RMSNorm over bf16 rows, two small workloads."""
    return Problem(
        id="drill/rmsnorm",
        definition=Definition(
            name="rmsnorm",
            axes={"rows": AxisVar(), "hidden": AxisConst(value=256)},
            inputs={
                "x": TensorSpec(shape=["rows", "hidden"], dtype="bfloat16"),
                "weight": TensorSpec(shape=["hidden"], dtype="bfloat16"),
            },
            outputs={"y": TensorSpec(shape=["rows", "hidden"], dtype="bfloat16")},
            reference=GOOD,
        ),
        workloads=tuple(
            Workload(uuid=f"rows-{rows}", axes={"rows": rows},
                     inputs={"x": RandomInput(), "weight": RandomInput()})
            for rows in (32, 37)
        ),
    )  # fmt: skip


def main() -> None:
    """Run the drill, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, help="Seconds after which no more are begun.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows: dict[str, Row] = defaultdict(Row)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        (Path(folder) / "cache" / "build").mkdir(parents=True)
        tempfile.tempdir = folder  # What others on this machine leave there is not ours.
        drill = Drill(arguments.device, Path(folder))
        try:
            good = good_cases(drill.on_gpu)
            for it in good:  # Calibration, lazy imports and pools are there from here on.
                drill.evaluate(it, timing=True)
            drill.leaks.clear()
            before = drill.state()
            deck: list[Case] = []
            for number in range(arguments.count):
                limit = arguments.time_limit
                if limit is not None and time.perf_counter() - start > limit:
                    break
                if not deck:
                    deck = bad_cases(rng, drill.on_gpu)
                    rng.shuffle(deck)
                is_good = number % 3 == 2
                it = rng.choice(good) if is_good else deck.pop()
                status, message, seconds = drill.evaluate(it, timing=is_good)
                row = rows[it.kind]
                row.statuses[status.value] += 1
                row.seconds.append(seconds)
                if status not in it.allowed:
                    row.unexpected.append(f"{status.value}: {message[:200]}")
            leaks = drill.leaks + grown(before, drill.state())
        finally:
            drill.judge.close()
    if left := descendants(os.getpid()):
        leaks.append(f"after the judge's end: processes {left}")
    done = sum(len(row.seconds) for row in rows.values())
    report(rows, leaks, drill.name, done, time.perf_counter() - start)
    if arguments.json:
        data = {kind: vars(row) for kind, row in rows.items()}
        arguments.json.write_text(json.dumps({"rows": data, "leaks": leaks}, indent=1))
    sys.exit(1 if leaks or any(row.unexpected for row in rows.values()) else 0)


def report(rows: dict[str, Row], leaks: list[str], name: str, count: int, seconds: float) -> None:
    """The table of docs/security.md."""
    print(f"{count} evaluations on {name} in {seconds:.0f} s\n")
    print(
        "| kind | evaluations | status | median s | unexpected |\n| --- | --- | --- | --- | --- |"
    )
    for kind, row in sorted(rows.items(), key=lambda item: (item[0] != "good", item[0])):
        statuses = ", ".join(f"{k} {v}" for k, v in sorted(row.statuses.items()))
        middle = statistics.median(row.seconds)
        print(
            f"| {kind} | {len(row.seconds)} | {statuses} | {middle:.2f} | {len(row.unexpected)} |"
        )
    for kind, row in rows.items():
        for text in row.unexpected:
            print(f"UNEXPECTED {kind}: {text}")
    for text in leaks:
        print(f"LEAK {text}")
    print(f"\nleaks: {len(leaks)}")


if __name__ == "__main__":
    main()
