"""Whatever a worker does, the judge gets a clean outcome, and nothing is left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sol_gym.evaluation import Status
from sol_gym.sandbox.worker.isolation import descendants
from sol_gym.solution import Solution
from tests.conftest import RMSNORM


def outcome_status(outcome):
    return outcome.status or outcome.results[0].status


def outcome_message(outcome):
    return outcome.message or outcome.results[0].message


@pytest.fixture(autouse=True)
def nothing_left_behind(judge, judged):
    """After each fault: no process, no scratch folder, no memory file; and the next one is judged well."""
    yield
    deadline = time.monotonic() + 5
    zygote = judge.zygote._process.pid
    while descendants(zygote) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert descendants(zygote) == []
    assert list(judge.scratch.glob("eval-*")) == []
    assert not [name for name in os.listdir("/dev/shm") if "sol_gym" in name]
    open_files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not [name for name in open_files if "memfd:sol_gym" in name]
    assert judged(RMSNORM).results[0].status is Status.PASSED


def test_a_worker_that_loops_for_ever_times_out(judged):
    start = time.monotonic()
    outcome = judged("def run(x, weight):\n    while True:\n        pass\n", timeout_s=2.0)
    assert outcome_status(outcome) is Status.TIMEOUT
    assert time.monotonic() - start < 90


def test_a_module_that_never_finishes_loading_times_out(judged):
    outcome = judged(
        "import time\ntime.sleep(1000)\ndef run(x, weight):\n    return x\n", timeout_s=1.5
    )
    assert outcome_status(outcome) is Status.TIMEOUT


def test_a_worker_that_exhausts_memory_is_ended(judged):
    source = "def run(x, weight):\n    hoard = []\n    while True:\n        hoard.append(b'x' * (1 << 20) * (len(hoard) + 1))\n"
    outcome = judged(source)
    assert outcome_status(outcome) is Status.RUNTIME_ERROR
    assert "memory limit" in outcome_message(outcome)


@pytest.mark.parametrize("call", ["os._exit(0)", "os._exit(3)", "sys.exit(0)", "raise SystemExit"])
def test_leaving_early_is_a_failure_whatever_the_exit_code(judged, call):
    outcome = judged(f"import os, sys\ndef run(x, weight):\n    {call}\n")
    assert outcome_status(outcome) is Status.RUNTIME_ERROR


def test_a_worker_that_kills_itself_is_a_runtime_error(judged):
    outcome = judged(
        "import os, signal\ndef run(x, weight):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert outcome_status(outcome) is Status.RUNTIME_ERROR
    assert "SIGKILL" in outcome_message(outcome)


def test_an_exception_reaches_its_author_with_the_line(judged):
    outcome = judged("def run(x, weight):\n    raise ValueError('rows must be even')\n")
    assert outcome_status(outcome) is Status.RUNTIME_ERROR
    assert "rows must be even" in outcome_message(outcome)
    assert "line 2" in outcome_message(outcome)


def test_a_segmentation_fault_in_python_is_a_runtime_error(judged):
    outcome = judged("import ctypes\ndef run(x, weight):\n    ctypes.string_at(0)\n")
    assert outcome_status(outcome) is Status.RUNTIME_ERROR
    assert "SIGSEGV" in outcome_message(outcome)


def test_a_segmentation_fault_in_compiled_code_is_a_runtime_error(judged):
    source = '#include <cstdint>\nextern "C" void run(const void*, const void*, void* y, int64_t) { *(volatile int*)8 = 1; }\n'
    outcome = judged(Solution.from_text(source))
    assert outcome_status(outcome) is Status.RUNTIME_ERROR
    assert "SIGSEGV" in outcome_message(outcome)


def test_printing_a_megabyte_does_no_harm_and_keeps_both_ends(judged):
    source = RMSNORM + "\nprint('first line')\nprint('x' * (1 << 20))\nprint('last line')\n"
    outcome = judged(source)
    assert outcome.results[0].status is Status.PASSED
    assert outcome.log.startswith("first line") and outcome.log.rstrip().endswith("last line")
    assert len(outcome.log) < 20_000


@pytest.mark.parametrize(
    "value", ["None", "42", "'text'", "object()", "[x, x]", "(x, weight)", "{}", "{'y': None}"]
)
def test_returning_nonsense_is_a_shape_error_that_says_what_was_expected(judged, value):
    outcome = judged(f"def run(x, weight):\n    return {value}\n")
    assert outcome_status(outcome) is Status.INCORRECT_SHAPE
    assert "expected" in outcome_message(outcome)


def test_a_wrong_dtype_is_told_apart(judged):
    outcome = judged("def run(x, weight):\n    return x.float()\n")
    assert outcome_status(outcome) is Status.INCORRECT_DTYPE
    assert "bfloat16" in outcome_message(outcome)


def test_reserving_address_space_without_end_is_a_runtime_error(judged):
    source = "import mmap\ndef run(x, weight):\n    hoard = []\n    while True:\n        hoard.append(mmap.mmap(-1, 1 << 30))\n"
    assert outcome_status(judged(source)) is Status.RUNTIME_ERROR


def test_children_that_outlive_the_worker_are_killed(judged):
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n" + RMSNORM
    )
    assert judged(source).results[0].status is Status.PASSED


def test_writing_nonsense_on_every_descriptor_breaks_only_its_author(judged):
    source = (
        "import os\ndef run(x, weight):\n"
        "    for fd in range(3, 64):\n"
        "        try:\n            os.write(fd, b'\\xff' * 64)\n"
        "        except OSError:\n            pass\n"
        "    return x\n"
    )
    assert outcome_status(judged(source)) in (
        Status.REWARD_HACK,
        Status.RUNTIME_ERROR,
        Status.TIMEOUT,
    )


def test_closing_the_channel_breaks_only_its_author(judged):
    source = "import os\ndef run(x, weight):\n    os.closerange(3, 64)\n    return x\n"
    assert outcome_status(judged(source, timeout_s=10.0)) in (Status.RUNTIME_ERROR, Status.TIMEOUT)


def test_read_only_folders_in_scratch_are_removed(judged):
    source = (
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0o500)\n"
        + RMSNORM
    )
    assert judged(source).results[0].status is Status.PASSED


def test_without_namespaces_orphans_are_found_too(judge, toy):
    from dataclasses import replace

    from sol_gym.sandbox.request import Request

    limits = judge.limits
    judge.limits = replace(limits, namespaces=False)
    try:
        source = (
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n" + RMSNORM
        )
        outcome = judge.evaluate(Request(toy, Solution.from_text(source), timing=False))
    finally:
        judge.limits = limits
    assert outcome.results[0].status is Status.PASSED
    assert "pid_ns" not in outcome.isolation


def test_the_scratch_folder_of_a_killed_judge_is_removed_by_the_next(judge, tmp_path, monkeypatch):
    import tempfile

    from sol_gym.sandbox.scratch import remove_abandoned_scratch

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive = tmp_path / "sol_gym-judge-4194303-x", tmp_path / f"sol_gym-judge-{os.getpid()}-x"
    dead.mkdir()
    alive.mkdir()
    remove_abandoned_scratch()
    assert not dead.exists()
    assert alive.exists()
    assert Path(judge.scratch).is_dir()
