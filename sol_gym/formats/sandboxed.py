"""Running a file's Python without trusting it.

To learn what an imported file computes (shapes of weights and outputs, whether an output ever
changes) its code has to run. It runs where candidates run: in a worker of the sandbox, forked from
a zygote, with no network, a read-only system and limits, and never in the caller's process. What
comes back is JSON of limited size, and counts as a claim: a hostile file can lie about itself.

The worker loads a small driver as if it were a solution; the driver calls one function of sol_gym
on the payload and writes its answer into the scratch folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sol_gym

from ..errors import ProblemError
from ..sandbox.limits import Limits
from ..sandbox.process import Worker, WorkerGone, Zygote
from ..sandbox.scratch import make_scratch
from ..sandbox.worker import wire
from ..sandbox.worker.isolation import OPTIONAL

_ANSWER_BYTES = 16 << 20
_MEMORY_BYTES = 12 << 30
_DRIVER = """
import importlib, json, os, sys
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "task.json")) as file:
    task = json.load(file)
# Workers cannot import sol_gym by name, which is of no use to a candidate; this driver is sol_gym's.
sys.meta_path[:] = [
    f for f in sys.meta_path if not str(getattr(f, "__module__", "")).startswith("_sol_gym_worker")
]
sys.path.insert(0, task["root"])
answer = getattr(importlib.import_module(task["module"]), task["function"])(**task["arguments"])
with open(os.path.join(os.path.dirname(here), "answer.json"), "w") as file:
    json.dump(answer, file)

def run():
    pass
"""


class SandboxFault(ProblemError):
    """The code that was run failed, or did not end; says nothing about sol_gym."""


class Sandbox:
    """Runs functions of sol_gym that execute untrusted code, each call in a fresh process.

    Example:
        >>> with Sandbox() as sandbox:
        ...     answer = sandbox.call("sol_gym.formats.audit", "audit_record", {"record": record})
    """

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._zygote: Zygote | None = None
        self._scratch: Path | None = None
        self.layers: dict[str, Any] = {}
        """Isolation layers of the last call: name -> True, or why not."""

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the zygote and remove the scratch folder."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    @property
    def missing_layers(self) -> list[str]:
        """Isolation layers that the machine did not grant to the last call, optional ones left out."""
        return [name for name in self.layers.keys() - OPTIONAL if self.layers[name] is not True]

    def call(
        self, module: str, function: str, arguments: dict[str, Any], *, timeout_s: float = 120.0,
        files: Sequence[Path] = (),
    ) -> Any:  # fmt: skip
        """What ``module.function(**arguments)`` returns in a sandboxed process.

        Args:
            module: importable name of a module of sol_gym.
            function: name in it; takes and returns JSON data.
            arguments: JSON data.
            timeout_s: wall seconds until the process is ended.
            files: to be readable there even if they lie in a home or temporary folder, which look
                empty otherwise.

        Raises:
            SandboxFault: it raised, did not end in time, exceeded its memory or answered nonsense.
            InfrastructureError: no process could be started.
        """
        if self._zygote is None:
            self._zygote = Zygote(on_gpu=False)
            self._scratch = make_scratch()
        assert self._scratch is not None
        task = {
            "root": str(Path(sol_gym.__file__).resolve().parent.parent),
            "module": module,
            "function": function,
            "arguments": arguments,
        }

        def prepare(scratch: Path) -> None:
            (scratch / "src").mkdir()
            (scratch / "src" / "driver.py").write_text(_DRIVER)
            (scratch / "src" / "task.json").write_text(json.dumps(task))

        cpus = sorted(os.sched_getaffinity(0))
        worker = Worker.spawn(
            self._zygote,
            Limits(wall_s=timeout_s + 5.0, memory_bytes=self._memory_bytes).without_cuda(),
            hidden=[],
            environment={"TRITON_INTERPRET": "1"},
            cpus=cpus,
            scratch_base=self._scratch,
            prepare=prepare,
            shown=_real_names([Path(sol_gym.__file__).parent, *files]),
        )
        self.layers = worker.layers
        log = ""
        try:
            fault = self._run(worker, len(cpus), timeout_s)
            answer = None if fault else _answer(worker)
        finally:
            log = worker.kill()
        if fault:
            raise SandboxFault(f"{fault}{_tail(log)}")
        return answer

    @staticmethod
    def _run(worker: Worker, threads: int, timeout_s: float) -> str:
        """Have the driver do its task; returns what went wrong, or nothing."""
        message: dict[str, Any] = {
            "cmd": "load", "device": "cpu", "dir": str(worker.scratch / "src"),
            "entry_file": "driver.py", "entry_function": "run", "binding": "python",
            "library": None, "dps": False, "inputs": [], "outputs": [],
        }  # fmt: skip
        try:
            worker.start("cpu", threads, None)
            reply = worker.ask(message, timeout_s)
        except wire.Timeout:
            return f"it did not end within {timeout_s:g} s"
        except wire.ProtocolError as error:
            return f"its process answered nonsense: {error}"
        except WorkerGone as error:
            return str(error)
        return "" if reply.get("ok") is True else str(reply.get("message", "it failed"))


def _answer(worker: Worker) -> Any:
    """The JSON a task left; untrusted, so neither links nor long files are followed."""
    try:
        descriptor = worker.open_file("answer.json")
    except wire.ProtocolError as error:
        raise SandboxFault(f"it left no answer: {error}") from None
    with open(descriptor, "rb") as answer:
        data = answer.read(_ANSWER_BYTES + 1)
    if len(data) > _ANSWER_BYTES:
        raise SandboxFault(f"its answer has more than {_ANSWER_BYTES} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise SandboxFault("its answer is not JSON") from None


def _real_names(paths: Sequence[Path]) -> list[str]:
    """The paths as they were named and, links followed, as they are."""
    return sorted({name for path in paths for name in (str(path.absolute()), str(path.resolve()))})


def _tail(log: str) -> str:
    lines = log.strip().splitlines()[-3:]
    return f" (it printed: {' | '.join(lines)})" if lines else ""
