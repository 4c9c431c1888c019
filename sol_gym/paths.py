"""Where sol_gym keeps things outside a project: one cache folder and one runtime folder."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import InfrastructureError


def cache_dir() -> Path:
    """Folder for calibrations, builds and measured baselines.

    `SOL_GYM_CACHE`, else `XDG_CACHE_HOME`/sol_gym, else ~/.cache/sol_gym. Everything in it can be
    deleted at any time.
    """
    if override := os.environ.get("SOL_GYM_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sol_gym"


def runtime_dir() -> Path:
    """Folder for the judge's sockets, locks and logs, private to the user.

    `SOL_GYM_RUNTIME`, else a folder in the system's temporary folder.

    Raises:
        InfrastructureError: it exists and belongs to somebody else or others may enter it.
    """
    override = os.environ.get("SOL_GYM_RUNTIME")
    path = Path(override) if override else Path(tempfile.gettempdir()) / f"sol_gym-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise InfrastructureError(
            f"{path} is not private to this user; remove it or set SOL_GYM_RUNTIME to a folder with mode 700"
        )
    return path


def write_atomically(file: Path, text: str) -> None:
    """A whole file or none, its folder made: others may read or write it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as part:
        part.write(text)
    os.replace(part.name, file)
