"""Every layer of the sandbox attacked for real, alone and together; see `sol_gym.sandbox.doctor`."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace

import pytest

from sol_gym.device import get_device
from sol_gym.errors import InfrastructureError
from sol_gym.evaluation import Status
from sol_gym.sandbox import bubblewrap, doctor
from sol_gym.sandbox.cgroup import Groups
from sol_gym.sandbox.judge import Judge
from sol_gym.sandbox.process import Worker
from sol_gym.sandbox.request import Request
from sol_gym.sandbox.scratch import open_beneath
from sol_gym.sandbox.worker import attempts, landlock, seccomp
from sol_gym.sandbox.worker.isolation import REQUIRED, missing
from sol_gym.solution import Solution
from tests.conftest import RMSNORM

BY_SECCOMP = [
    "ptrace_sibling", "read_sibling", "write_sibling", "unshare_user", "clone_user", "clone3_user",
    "userfaultfd", "io_uring", "keyring", "exhaust_segments", "connect_tcp", "connect_abstract",
    "connect_path",
]  # fmt: skip
BY_LANDLOCK = ["write_temporary", "connect_tcp", "connect_abstract", "signal_outside"]
BY_NAMESPACES = [
    "write_temporary", "read_project", "read_temporary", "connect_tcp", "connect_abstract",
    "connect_path", "signal_outside", "see_processes", "shared_memory",
]  # fmt: skip
EVERYTHING = frozenset({"landlock", "seccomp", "other_user", "cgroup"})


@pytest.fixture(scope="module")
def limits(judge):
    if missing(judge.probe()):
        pytest.skip(f"this machine lacks layers: {missing(judge.probe())}")
    return replace(judge.limits, memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def findings(judge, limits):
    return {finding.attempt: finding for finding in doctor.examine(judge)}


def held(judge, limits, names):
    with doctor.bait(judge) as about:
        return {name: fate[0] for name, fate in doctor.attack(judge, limits, about, names).items()}


@pytest.mark.parametrize("name", doctor.LAYERS)
def test_an_attempt_is_held(findings, name):
    assert findings[name].held, findings[name].detail
    assert findings[name].held_without_namespaces is not False


def test_every_attempt_names_what_holds_it_and_every_required_layer_is_attacked():
    assert set(doctor.LAYERS) == set(attempts.ATTEMPTS)
    attacked = {layer for layers in doctor.LAYERS.values() for layer in layers}
    # Changing the root of mounts is `mount` and `unmount`; no_new_privs is what seccomp rests on.
    assert set(REQUIRED) - attacked <= {"mount_ns", "no_new_privs"}


def test_without_any_layer_the_same_attempts_get_through(judge, limits):
    names = sorted({*BY_SECCOMP, *BY_LANDLOCK, *BY_NAMESPACES})
    naked = replace(limits, namespaces=False, leave_out=EVERYTHING)
    assert [name for name, is_held in held(judge, naked, names).items() if is_held] == []


def test_seccomp_alone_holds_what_it_is_for(judge, limits):
    alone = replace(limits, namespaces=False, leave_out=EVERYTHING - {"seccomp"})
    assert all(held(judge, alone, BY_SECCOMP).values())


def test_landlock_alone_holds_what_it_is_for(judge, limits):
    if landlock.version() < 6:
        pytest.skip("this kernel's Landlock keeps neither signals nor abstract sockets in")
    alone = replace(limits, namespaces=False, leave_out=EVERYTHING - {"landlock"})
    assert all(held(judge, alone, BY_LANDLOCK).values())


def test_namespaces_alone_hold_what_they_are_for(judge, limits):
    alone = replace(limits, leave_out=EVERYTHING)
    assert all(held(judge, alone, BY_NAMESPACES).values())


def test_a_worker_that_stays_root_still_reaches_no_device_and_no_kernel_setting(judge, limits):
    if os.getuid():
        pytest.skip("the judge is not root")
    names = [
        "open_devices",
        "change_kernel_settings",
        "write_system",
        "change_user",
        "see_processes",
    ]
    rooted = replace(limits, leave_out=frozenset({"other_user"}))
    assert held(judge, rooted, names) == dict.fromkeys(names, True)
    naked = replace(limits, namespaces=False, leave_out=EVERYTHING)
    # This is what is at stake: root without capabilities may still set kernel.core_pattern.
    assert held(judge, naked, ["change_kernel_settings"]) == {"change_kernel_settings": False}


def test_limits_do_not_bite_below_themselves(judge, limits):
    with doctor.bait(judge) as about:
        worker = judge.spawn(limits, None, lambda scratch: None)
        try:
            for name, more in {
                "exhaust_memory": {"megabytes": 200}, "exhaust_shared_memory": {"megabytes": 200},
                "exhaust_memory_files": {"megabytes": 50}, "exhaust_scratch": {"megabytes": 50},
                "exhaust_processes": {"most": 20}, "exhaust_descriptors": {"most": 500},
            }.items():  # fmt: skip
                told = {k: v for k, v in about.items() if not callable(v)} | more
                reply = worker.ask({"cmd": "attempt", "name": name, "about": told}, 30.0)
                assert reply["broke"] is True, reply
        finally:
            worker.kill()


def test_a_filter_exists_for_both_architectures_and_ends_in_allow():
    for machine in ("x86_64", "aarch64"):
        for unix_sockets in (True, False):
            lines = seccomp.program(machine, unix_sockets=unix_sockets)
            assert lines[-1] == (0x06, 0, 0, 0x7FFF0000)
            for at, (code, yes, no, _) in enumerate(lines):
                if code & 0x07 == 0x05:  # A jump stays inside the program.
                    assert at + 1 + max(yes, no) < len(lines)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_answers_each_call_as_its_tables_say(machine):
    column = ["x86_64", "aarch64"].index(machine)
    refused = {n[column] for n in seccomp.REFUSED.values()} - {None}
    absent = {n[column] for n in seccomp.ABSENT.values()}
    clone, ioctl = ((56, 16), (220, 29))[column]
    socket_, pair = ((41, 53), (198, 199))[column]
    for unix_sockets in (True, False):
        lines = seccomp.program(machine, unix_sockets=unix_sockets)
        for number in range(600):
            answer = run_filter(lines, seccomp.AUDIT_ARCH[machine], number, 1, 0)
            if number in refused:
                assert answer == 0x50000 | errno.EPERM
            elif number in absent:
                assert answer == 0x50000 | errno.ENOSYS
            elif number == socket_ and not unix_sockets:
                assert answer == 0x50000 | errno.EAFNOSUPPORT
            else:
                assert answer == 0x7FFF0000, number
        assert run_filter(lines, seccomp.AUDIT_ARCH[machine], socket_, 2, 0) != 0x7FFF0000
        assert run_filter(lines, seccomp.AUDIT_ARCH[machine], pair, 2, 0) != 0x7FFF0000
        assert run_filter(lines, seccomp.AUDIT_ARCH[machine], clone, 0x10000011, 0) != 0x7FFF0000
        assert run_filter(lines, seccomp.AUDIT_ARCH[machine], clone, 0x003D0F00, 0) == 0x7FFF0000
        assert run_filter(lines, seccomp.AUDIT_ARCH[machine], ioctl, 1, 0x5412) != 0x7FFF0000
        assert run_filter(lines, 0x40000003, 1, 0, 0) == 0x80000000


def run_filter(lines, arch, number, arg0, arg1):
    """What the BPF program returns for a call (the few instructions that it uses)."""
    data, value, at = {0: number, 4: arch, 16: arg0, 24: arg1}, 0, 0
    while True:
        code, yes, no, constant = lines[at]
        at += 1
        if code == 0x20:
            value = data[constant]
        elif code == 0x06:
            return constant
        else:
            truth = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant}
            at += yes if truth[code] else no


def test_strict_isolation_runs_nothing_where_a_layer_is_missing_and_names_it(judge, toy, tmp_path):
    request = Request(toy, Solution.from_text(RMSNORM), timing=False, strict_isolation=True)
    whole = judge.limits
    judge.limits = replace(whole, leave_out=frozenset({"landlock"}))
    try:
        with pytest.raises(InfrastructureError, match=r"landlock \(left out\)"):
            judge.evaluate(request)
    finally:
        judge.limits = whole
    if not missing(judge.probe()):
        assert judge.evaluate(request).results[0].status is Status.PASSED


def test_a_judge_reads_only_plain_files_beneath_a_workers_folder(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "file").write_text("x")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "inside" / "up").symlink_to("..")
    folder = os.open(tmp_path / "inside", os.O_RDONLY)
    try:
        os.close(open_beneath(folder, "file"))
        for path in ("link", "up/secret", "../secret", str(tmp_path / "secret"), "none"):
            with pytest.raises(OSError):
                open_beneath(folder, path)
    finally:
        os.close(folder)


def test_a_control_group_takes_a_worker_in_and_is_removed_with_it(judge):
    groups = Groups(controllers=())  # Those of memory and processes may belong to cgroup v1 here.
    if groups.root is None:
        pytest.skip(f"no control group can be made here: {groups.note}")
    root, whole = groups.root, judge.groups
    judge.groups = groups
    try:
        worker = judge.spawn(judge.limits, None, lambda scratch: None)
        try:
            assert worker.layers["cgroup"] is True
            inside = (root / worker.scratch.name / "cgroup.procs").read_text().split()
            assert str(worker.root) in inside
        finally:
            worker.kill()
        assert [path for path in root.iterdir() if path.is_dir()] == []
    finally:
        judge.groups = whole
        groups.close()
    assert not root.exists()


def test_bubblewrap_holds_where_this_process_may_make_no_namespaces(judge, toy, tmp_path):
    if not bubblewrap.works():
        pytest.skip("bubblewrap is not installed, or not allowed to make namespaces")
    wrapped = Judge(
        get_device("cpu"), cache=tmp_path, bubblewrapped=True,
        limits=replace(judge.limits, leave_out=EVERYTHING),
    )  # fmt: skip
    try:
        layers = wrapped.probe()
        assert set(missing(layers)) == {
            "pid_ns", "fresh_proc", "kernel_settings", "few_devices", "user_ns", "scratch_limit", "landlock", "seccomp",
        }  # fmt: skip
        names = ["write_system", "write_temporary", "read_project", "read_temporary", "connect_tcp",
                 "connect_abstract", "connect_path", "shared_memory", "mount", "leave_daemon"]  # fmt: skip
        assert held(wrapped, wrapped.limits, names) == dict.fromkeys(names, True)
        wrapped.limits = judge.limits
        request = Request(toy, Solution.from_text(RMSNORM), timing=False)
        assert wrapped.evaluate(request).results[0].status is Status.PASSED
    finally:
        wrapped.close()


def test_a_folder_that_is_shown_can_be_read_inside_a_private_one(judge, limits, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    tmp_path.chmod(0o755)
    about = {"bait_file": str(file)}
    others = [f"{tmp_path}-{'x' * 200}-{n}" for n in range(2000)]  # A request of many pieces.
    for shown, broke in (([], False), (others, False), ([*others, str(tmp_path)], True)):
        worker = Worker.spawn(
            judge.zygote, limits, hidden=judge.hidden, environment=judge.backend.environment(),
            cpus=judge.backend.worker_cpus(), scratch_base=judge.scratch, shown=shown,
        )  # fmt: skip
        try:
            reply = worker.ask({"cmd": "attempt", "name": "read_temporary", "about": about}, 30.0)
            assert reply["broke"] is broke, reply
        finally:
            worker.kill()


def test_threads_processes_and_compilers_work_inside(judged):
    source = (
        "import concurrent.futures, multiprocessing, os, subprocess, tempfile, threading\n"
        "with concurrent.futures.ThreadPoolExecutor(8) as pool:\n"
        "    assert sum(pool.map(int, range(100))) == 4950\n"
        "context = multiprocessing.get_context('fork')\n"
        "with context.Pool(2) as pool:\n"
        "    assert pool.map(abs, [-1, -2]) == [1, 2]\n"
        "open('a.c', 'w').write('int main(void) { return 7; }')\n"
        "subprocess.run(['gcc', 'a.c', '-o', 'a'], check=True)\n"
        "assert subprocess.run(['./a']).returncode == 7\n"
        "with tempfile.NamedTemporaryFile() as f:\n    f.write(b'x')\n" + RMSNORM
    )
    outcome = judged(source)
    assert outcome.status is None, outcome.message
    assert outcome.results[0].status is Status.PASSED


@pytest.fixture(autouse=True, scope="module")
def no_bait_is_left():
    yield
    for folder in ("/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            assert [name for name in os.listdir(folder) if name.startswith("sol_gym-bait-")] == []
