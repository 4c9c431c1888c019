"""Control groups (v2) for workers, where the judge may make them: memory and process limits that
the kernel enforces on the whole tree at once.

A group is made below the judge's own group or beside it (what systemd delegates to a user, or a
container's own hierarchy). Where that is not allowed, rlimits and the supervisor's watch remain; the
reason is recorded.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_CONTROLLERS = ("memory", "pids")


class Group:
    """One worker's control group."""

    def __init__(self, path: Path):
        self.path = path

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed something in it for want of memory."""
        with contextlib.suppress(OSError, ValueError):
            rows = (self.path / "memory.events").read_text().split("\n")
            counts = dict(row.split() for row in rows if row)
            return int(counts.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Kill what is left in it and remove it."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # A killed process leaves a moment later.
                time.sleep(0.002)


class Groups:
    """Makes groups for workers, if this machine lets it; `note` says why not."""

    def __init__(self, controllers: tuple[str, ...] = _CONTROLLERS) -> None:
        self._controllers = controllers
        self.root: Path | None = None
        self.note = "no cgroup v2 hierarchy is mounted"
        for parent in _candidates():
            self.root = self._usable(parent)
            if self.root:
                return

    def make(self, name: str, memory_bytes: int, tasks: int) -> Group | None:
        """A group with these limits, or None where there are no groups."""
        if self.root is None:
            return None
        path = self.root / name
        limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": tasks}
        try:
            path.mkdir()
            for file, value in limits.items():
                if file.split(".")[0] in self._controllers and (path / file).exists():
                    (path / file).write_text(str(value))
        except OSError as error:
            self.note = f"not permitted: {error.strerror}"
            with contextlib.suppress(OSError):
                path.rmdir()
            return None
        return Group(path)

    def close(self) -> None:
        """Remove the groups."""
        if self.root:
            with contextlib.suppress(OSError):
                self.root.rmdir()
            self.root = None

    def _usable(self, parent: Path) -> Path | None:
        """A fresh group below `parent` whose children have the controllers."""
        root = parent / f"sol_gym-{os.getpid()}-{id(self):x}"
        try:
            root.mkdir()
        except OSError as error:
            self.note = f"not writable: {error.strerror}"
            return None
        try:
            absent = [c for c in self._controllers if c not in _words(root / "cgroup.controllers")]
            if absent:  # Works only where the parent holds no process itself.
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in absent))
            if self._controllers:
                wanted = " ".join(f"+{c}" for c in self._controllers)
                (root / "cgroup.subtree_control").write_text(wanted)
            return root
        except OSError as error:
            self.note = f"controllers {', '.join(self._controllers)}: {error.strerror}"
            with contextlib.suppress(OSError):
                root.rmdir()
            return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _candidates() -> list[Path]:
    """The judge's own group and the one around it."""
    mounted = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            fields = line.split()
            if len(fields) > 2 and fields[2] == "cgroup2":
                mounted = Path(fields[1])
    if mounted is None:
        return []
    own = mounted
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = mounted / line[3:].lstrip("/")
    return [own] if own == mounted else [own, own.parent]
