"""What a candidate cannot reach. Each test runs in a real worker."""

from __future__ import annotations

import pytest

from sol_gym.evaluation import Status
from sol_gym.sandbox.worker.isolation import OPTIONAL, REQUIRED, missing
from tests.conftest import RMSNORM

_CHECK = """
import torch

def attempt():
{body}

try:
    attempt()
    reached = True
except BaseException as error:
    print(type(error).__name__, error)
    reached = False
if reached:
    raise RuntimeError("REACHED")
"""


def blocked(judged, body: str) -> str:
    """Run `body` in a worker; fails if it gets through. Returns what was printed."""
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    outcome = judged(_CHECK.format(body=indented) + RMSNORM)
    assert "REACHED" not in outcome.message, body
    assert outcome.results[0].status is Status.PASSED
    return outcome.log


@pytest.fixture(autouse=True)
def needs_namespaces(judge):
    if judge.probe().get("mount_ns") is not True:
        pytest.skip("this machine allows no unprivileged namespaces")


def test_every_required_layer_is_active_and_recorded(judged):
    layers = judged(RMSNORM).isolation
    assert missing(layers) == {}
    assert set(layers) == {*REQUIRED, *OPTIONAL}


def test_the_judge_cannot_be_imported(judged):
    blocked(judged, "import sol_gym.sandbox.judge")


def test_the_projects_files_cannot_be_read(judged):
    from sol_gym import problem

    blocked(judged, f"print(open({problem.__file__!r}).read()[:50])")


def test_the_system_cannot_be_written(judged):
    log = blocked(judged, "open('/usr/local/owned', 'w').write('x')")
    assert "Read-only" in log


def test_temporary_files_elsewhere_cannot_be_written(judged):
    blocked(judged, "open('/tmp/left-behind', 'w').write('x')")


def test_the_scratch_folder_can_be_written(judged):
    source = (
        "import tempfile\nwith tempfile.NamedTemporaryFile() as f:\n    f.write(b'x')\nopen('note', 'w').write('x')\n"
        + RMSNORM
    )
    assert judged(source).results[0].status is Status.PASSED


def test_there_is_no_network(judged):
    blocked(judged, "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=2)")
    blocked(
        judged, "import socket\nassert [name for _, name in socket.if_nameindex() if name != 'lo']"
    )


def test_no_process_outside_is_visible(judged):
    blocked(judged, "import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) > 4")


def test_the_parent_cannot_be_signalled(judged):
    blocked(
        judged, "import os, signal\nassert os.getppid() != 1\nos.kill(os.getppid(), signal.SIGKILL)"
    )


def test_no_privilege_can_be_gained(judged):
    blocked(judged, "import os\nos.chroot('.')")
    blocked(judged, "import ctypes\nassert ctypes.CDLL(None).umount2(b'/proc', 2) == 0")


def test_descriptors_of_the_judge_are_not_inherited(judged):
    blocked(
        judged,
        "import os\n"
        "names = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2]\n"
        "strange = [n for n in names if not n.startswith(('socket:', '/memfd:sol_gym', '/proc/'))]\n"
        "print(names)\n"
        "assert strange",
    )


def test_the_environment_is_clean(judged, monkeypatch):
    blocked(
        judged,
        "import os\nassert any(k.startswith(('SOL_GYM', 'PYTEST', 'AWS')) for k in os.environ)",
    )
