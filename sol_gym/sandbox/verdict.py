"""How a workload can end before it is measured, and what each ending says about the solution."""

from __future__ import annotations

from typing import Any

from ..evaluation import Status
from .process import WorkerGone
from .worker import wire


class Verdict(Exception):
    """The workload is decided: it failed with a status and a message for the author."""

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status, self.message = status, message


class NotCapturable(Exception):
    """The solution cannot run inside a CUDA graph; the worker may be unusable now."""


class OutOfMemory(NotCapturable):
    """The captured calls do not fit into device memory together; fewer may."""


class WorkedWhileStopped(Exception):
    """The device was busy while the worker was stopped, and came to rest when the worker was killed."""


def accepted(reply: dict[str, Any]) -> dict[str, Any]:
    """A worker's reply if it reports success; raises the `Verdict` it amounts to otherwise."""
    if reply.get("ok") is True:
        return reply
    status = {
        "shape": Status.INCORRECT_SHAPE,
        "dtype": Status.INCORRECT_DTYPE,
        "load": Status.COMPILE_ERROR,
        "compile": Status.COMPILE_ERROR,
    }.get(str(reply.get("kind")), Status.RUNTIME_ERROR)
    text = reply.get("traceback") or reply.get("message") or "the worker sent an empty reply"
    raise Verdict(status, str(text))


def decide(error: Exception) -> tuple[Status, str]:
    """Status and message that an exception while measuring amounts to.

    Raises:
        the error itself, if it is the judge's own and says nothing about the solution.
    """
    if isinstance(error, Verdict):
        return error.status, error.message
    if isinstance(error, WorkerGone):
        timeout = error.exit.reason.startswith("wall time")
        return Status.TIMEOUT if timeout else Status.RUNTIME_ERROR, str(error)
    if isinstance(error, wire.Timeout):
        return Status.TIMEOUT, "no answer within the time limit"
    if isinstance(error, wire.ProtocolError):
        return Status.REWARD_HACK, f"the worker broke the protocol: {error}"
    raise error
