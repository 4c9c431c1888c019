"""Landlock: what of the file system a worker may touch, whatever it is allowed to otherwise.

It works without any privilege and without namespaces, and it is independent of both: a mistake in
the mounts is not yet a way out. Reading and executing stay allowed everywhere (what must not be
read is hidden by the mounts), writing only where a list says so. The same domain keeps signals,
TCP and abstract sockets inside where the kernel is new enough.
"""

from __future__ import annotations

import ctypes
import os

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = _WRITE_FILE | _READ_FILE | _TRUNCATE
EVERYTHING = (1 << 16) - 1

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's Landlock ABI version, 0 where there is none."""
    return max(0, _libc.syscall(_SYS_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def restrict(rules: list[tuple[str, int]]) -> bool | str:
    """Keep this thread and all its future children to `rules`; True, or why not.

    Args:
        rules: (path, rights); rights hold for everything beneath the path. Paths that do not exist
            are left out. Nothing else of the file system can be reached.
    """
    abi = version()
    if not abi:
        return "the kernel has no Landlock"
    handled = _FIRST_VERSION
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if abi >= since else 0
    attributes = _Ruleset(handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _libc.syscall(_SYS_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    if ruleset < 0:
        return _reason("ruleset")
    try:
        for path, rights in rules:
            if (failure := _allow(ruleset, path, rights & handled)) is not None:
                return failure
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if _libc.syscall(_SYS_RESTRICT_SELF, ruleset, 0):
            return _reason("restriction")
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> str | None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = _PathBeneath(rights, descriptor)
        if _libc.syscall(_SYS_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0):
            return _reason(path)
    finally:
        os.close(descriptor)
    return None


def _reason(what: str) -> str:
    return f"not permitted: {what}: {os.strerror(ctypes.get_errno())}"
