"""A seccomp filter that takes away the system calls a kernel author never needs.

Written as BPF by hand, because it must be installed in a fork of a warm interpreter: nothing may be
executed there. Everything not named is allowed: a list of what CUDA, compilers and torch may
call would break with their next release, while a list of what reaches other processes, mounts,
kernel interfaces and the network is short and stable.

What is refused fails with EPERM, except where software looks for ENOSYS to take another way
(clone3, whose flags a filter cannot read, and io_uring, whose kernel threads would keep running
while the worker is stopped). A system call of a foreign architecture ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # Memory that outlives its processes and that no limit counts.
    "shmget": (29, 194),
    # Observation of the machine, kernel interfaces with a history of holes.
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    # The machine itself.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "sysfs": (139, None),
}
"""System call -> its number on x86-64 and on aarch64; these fail with EPERM."""

ABSENT: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
"""These fail with ENOSYS."""

_CLONE, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), (41, 198), (53, 199), (16, 29)
_NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME together."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: typing into somebody's terminal."""

_PR_SET_NO_NEW_PRIVS = 38
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _FLAG_SPEC_ALLOW = 1, 4
_LD_W_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_X32_BIT = 0x40000000

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, constant)."""


def program(machine: str, *, unix_sockets: bool) -> list[Instruction]:
    """The filter as BPF instructions.

    Args:
        machine: "x86_64" or "aarch64".
        unix_sockets: whether `socket(AF_UNIX, ...)` works, which CUDA needs; without it only
            `socketpair` makes sockets. No other family works either way.

    Raises:
        KeyError: another machine.
    """
    column = _COLUMN[machine]
    eperm, enosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    lines: list[Instruction] = [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, AUDIT_ARCH[machine]),
        (_RET, 0, 0, _KILL_PROCESS),
        (_LD_W_ABS, 0, 0, _NR),
    ]
    if machine == "x86_64":
        lines += [(_JGE, 0, 1, _X32_BIT), (_RET, 0, 0, enosys)]
    for table, answer in ((REFUSED, eperm), (ABSENT, enosys)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                lines += [(_JEQ, 0, 1, number), (_RET, 0, 0, answer)]
    # Each of the following ends the program for its call: the number is gone from the register.
    lines += [
        (_JEQ, 0, 4, _CLONE[column]),
        (_LD_W_ABS, 0, 0, _ARG0),
        (_JSET, 0, 1, _NAMESPACE_FLAGS),
        (_RET, 0, 0, eperm),
        (_RET, 0, 0, _ALLOW),
        (_JEQ, 0, 5, _IOCTL[column]),
        (_LD_W_ABS, 0, 0, _ARG1),
        (_JEQ, 1, 0, _TERMINAL_INPUT[0]),
        (_JEQ, 0, 1, _TERMINAL_INPUT[1]),
        (_RET, 0, 0, eperm),
        (_RET, 0, 0, _ALLOW),
    ]
    refused_family = _ERRNO | errno.EAFNOSUPPORT
    kinds = [_SOCKETPAIR[column]] + ([_SOCKET[column]] if unix_sockets else [])
    for number in kinds:
        lines += [
            (_JEQ, 0, 4, number),
            (_LD_W_ABS, 0, 0, _ARG0),
            (_JEQ, 1, 0, socket.AF_UNIX),
            (_RET, 0, 0, refused_family),
            (_RET, 0, 0, _ALLOW),
        ]
    if not unix_sockets:
        lines += [(_JEQ, 0, 1, _SOCKET[column]), (_RET, 0, 0, refused_family)]
    lines.append((_RET, 0, 0, _ALLOW))
    return lines


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter))]


def install(*, unix_sockets: bool) -> bool | str:
    """Put the filter on this thread and all its future children; True, or why not.

    Speculation is left as it is (SECCOMP_FILTER_FLAG_SPEC_ALLOW): older kernels slow filtered
    processes down otherwise, and a kernel's time is what is measured here.
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        return f"no filter for {machine}"
    lines = program(machine, unix_sockets=unix_sockets)
    array = (_Filter * len(lines))(*[_Filter(*line) for line in lines])
    code = _Program(len(lines), array)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for flags in (_FLAG_SPEC_ALLOW, 0):
        if not libc.syscall(_SYS_SECCOMP[machine], _SET_MODE_FILTER, flags, ctypes.byref(code)):
            return True
    return f"not permitted: {errno.errorcode.get(ctypes.get_errno(), 'unknown error')}"
