"""Folders that workers write into, and reading from them without trusting what lies there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_SCRATCH = "sol_gym-judge-"
_SYS_OPENAT2 = 437
_BENEATH = 0x08 | 0x04 | 0x01
"""RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV."""


def open_beneath(folder: int, path: str) -> int:
    """Open a file for reading below a folder, following no link and leaving it nowhere (openat2)."""
    how = (ctypes.c_uint64 * 3)(os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, 0, _BENEATH)
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(_SYS_OPENAT2, folder, path.encode(), how, ctypes.sizeof(how))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def remove_tree(path: Path) -> None:
    """Remove a folder a candidate wrote into, whatever modes it set."""

    def retry(function: Any, name: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
            function(name)

    shutil.rmtree(path, onerror=retry)


def make_scratch() -> Path:
    """A folder for workers' scratch folders; those that killed processes left behind are removed."""
    remove_abandoned_scratch()
    folder = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")).resolve()
    folder.chmod(0o711)  # Workers may be another user; each folder in it is private.
    return folder


def remove_abandoned_scratch() -> None:
    """Remove scratch folders of processes that were killed before they could do so themselves."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = path.name.removeprefix(_SCRATCH).split("-")[0]
        with contextlib.suppress(OSError):
            if (
                pid.isdigit()
                and not Path("/proc", pid).exists()
                and path.lstat().st_uid == os.getuid()
            ):
                remove_tree(path)
