"""What a worker may use, as which user it runs, and which layers of isolation are left out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from ..errors import InfrastructureError
from .fallback import SUSPECTS

_GIB = 1 << 30


def _tasks() -> int:
    return max(1024, 32 * (os.cpu_count() or 1))


_OPTIONAL_LAYERS = frozenset({*SUSPECTS, "cgroup", "other_user"})


def _left_out() -> frozenset[str]:
    names = frozenset(filter(None, os.environ.get("SOL_GYM_LEAVE_OUT", "").split(",")))
    if unknown := names - _OPTIONAL_LAYERS:
        raise InfrastructureError(
            f"SOL_GYM_LEAVE_OUT names {', '.join(sorted(unknown))}; "
            f"expected some of {', '.join(sorted(_OPTIONAL_LAYERS))}"
        )
    return names


@dataclass(frozen=True)
class Limits:
    """What a worker may use. Memory is host memory; device memory is limited by the device."""

    wall_s: float = 300.0
    memory_bytes: int = 16 * _GIB
    """Private memory of all its processes together; files in memory have limits of their own."""
    address_space_bytes: int | None = None
    file_bytes: int = 4 * _GIB
    open_files: int = 4096
    shm_bytes: int = 2 * _GIB
    scratch_bytes: int = 2 * _GIB
    """Size of the scratch folder, which lies in memory."""
    tasks: int = field(default_factory=_tasks)
    """Processes and threads together."""
    namespaces: bool = True
    """Whether to use namespaces where the machine allows them (tests switch them off)."""
    leave_out: frozenset[str] = field(default_factory=_left_out)
    """Layers not to use, of `_OPTIONAL_LAYERS`. For tests and `doctor`, which try what the others
    hold alone, and for a machine whose driver stumbles over one (`SOL_GYM_LEAVE_OUT`)."""

    def without_cuda(self) -> Limits:
        """With a limit of the address space too, which CUDA reserves by the terabyte."""
        if self.address_space_bytes is not None:
            return self
        return replace(self, address_space_bytes=4 * self.memory_bytes + (8 << 30))


DEFAULT_WORKER_UID = 65533
"""The user that workers of a judge that runs as root become on the CPU. It must own nothing."""


def worker_uid(*, on_gpu: bool) -> int | None:
    """The user to run workers as: `SOL_GYM_WORKER_UID`, else a default on the CPU.

    On a GPU the driver shares memory between processes of one user; whether it does so between
    users depends on it, so nothing is changed there unasked.
    """
    asked = os.environ.get("SOL_GYM_WORKER_UID")
    if asked:
        try:
            return int(asked) or None
        except ValueError:
            raise InfrastructureError(
                f"SOL_GYM_WORKER_UID is {asked!r}, expected the number of a user, or 0 for the judge's own"
            ) from None
    return None if on_gpu else DEFAULT_WORKER_UID
