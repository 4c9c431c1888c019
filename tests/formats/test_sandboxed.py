"""Untrusted code at import: where it runs, and what it cannot do."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from sol_gym.errors import ProblemError
from sol_gym.formats import ImportFailure, import_problems
from sol_gym.formats.sandboxed import Sandbox, SandboxFault

HOSTILE = """
import os, socket, sys, torch

try:
    open({mark!r}, "w").write("was here")
    wrote = True
except OSError:
    wrote = False
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=1)
    connected = True
except OSError:
    connected = False
if wrote or connected or os.path.exists("/proc/{client}/environ"):
    raise SystemExit("it got out")

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2

def get_inputs():
    return [torch.rand(4, 4)]

def get_init_inputs():
    return []
"""


def test_an_imported_file_reaches_neither_files_nor_network_nor_the_client(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        file = tmp_path / "hostile.py"
        mark = Path(tempfile.gettempdir()) / f"sol_gym-hostile-{os.getpid()}"
        text = HOSTILE.format(mark=str(mark), port=server.getsockname()[1], client=os.getpid())
        file.write_text(text)
        (item,) = import_problems(file)
    assert not mark.exists()
    assert not isinstance(item, ImportFailure), item.message
    assert "hostile" not in sys.modules


def test_a_failing_function_gives_its_message(sandbox):
    with pytest.raises(SandboxFault, match="uses 'a'; known axes"):
        sandbox.call("sol_gym.axes", "evaluate_axis", {"expression": "a", "values": {}})


def test_an_answer_comes_back_as_data(sandbox):
    arguments = {"expression": "a * 2", "values": {"a": 21}}
    assert sandbox.call("sol_gym.axes", "evaluate_axis", arguments) == 42
    assert sandbox.layers["no_new_privs"] is True


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import os; os._exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("raise SystemExit('enough')", "enough"),
        ("x = bytearray(1 << 62)", "MemoryError"),
    ],
)
def test_code_that_dies_is_a_fault_of_the_file(sandbox, statement, message):
    arguments = {"source": statement}
    with pytest.raises(SandboxFault, match=message):
        sandbox.call("sol_gym.formats.kernelbench_probe", "probe", arguments, timeout_s=60)


def test_code_that_hangs_is_ended(sandbox):
    arguments = {"source": "import time\nwhile True: time.sleep(1)"}
    with pytest.raises(SandboxFault, match=r"did not end within 0\.5 s"):
        sandbox.call("sol_gym.formats.kernelbench_probe", "probe", arguments, timeout_s=0.5)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("os.symlink('/etc/passwd', '../answer.json')", "left no answer"),
        ("os.mkfifo('../answer.json')", "not a regular file|did not end"),
        ("open('../answer.json', 'w').write('{')", "not JSON"),
        ("open('../answer.json', 'w').write('1' * (20 << 20))", "more than"),
    ],
)
def test_a_forged_answer_is_not_followed(sandbox, statement, message):
    # The code leaves its own answer and ends well before the driver would write one.
    code = (
        "import os\nos.chdir('src')\n"
        f"{statement}\n"
        "import json\njson.dump = lambda *_: None\n"
        "import builtins; real = builtins.open\n"
        "builtins.open = lambda f, *a, **k: real(os.devnull if 'answer' in str(f) else f, *a, **k)\n"
        "import torch\n"
        "class Model(torch.nn.Module):\n    forward = lambda self, x: x\n"
        "get_inputs = lambda: [torch.rand(1)]\nget_init_inputs = list\n"
    )
    with pytest.raises(SandboxFault, match=message):
        sandbox.call("sol_gym.formats.kernelbench_probe", "probe", {"source": code}, timeout_s=10)


def test_layers_that_are_missing_are_known():
    idle = Sandbox()
    assert idle.missing_layers == []
    idle.layers = {"pid_ns": "not permitted: no", "rlimits": True}
    assert idle.missing_layers == ["pid_ns"]


def test_closing_leaves_no_folder_and_no_process():
    running = Sandbox()
    running.call("sol_gym.axes", "evaluate_axis", {"expression": "1", "values": {}})
    scratch, zygote = running._scratch, running._zygote._process
    assert scratch.is_dir()
    running.close()
    assert not scratch.exists()
    assert zygote.poll() is not None


def test_a_sandbox_fault_is_a_problem_error():
    assert issubclass(SandboxFault, ProblemError)
