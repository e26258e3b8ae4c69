"""A seccomp filter as bytes, assembled here: system calls that no kernel code needs.

Above: bubblewrap.py, which puts it in the plan. Below: nothing. The engine's containers have their
own list in `images/seccomp.json`; both refuse what reaches around namespaces (keyrings, `bpf`,
`io_uring`, `userfaultfd`, mounting, new namespaces) or into other processes, and sockets of
families that no network namespace holds, such as AF_VSOCK.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

MEMORY_OUTSIDE_PROCESSES: Final = ("memfd_create", "memfd_secret", "shmget")
"""Calls that make memory belonging to no process: a watchdog that sums up processes misses it."""

SOCKET_FAMILIES: Final = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: what Python and its libraries ask for. The network
namespace holds each of them."""

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* by machine. Source: linux/audit.h."""

_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
"""Numbers on x86_64 and aarch64. Source: the kernel's syscall_64.tbl and asm-generic/unistd.h."""

_OPTIONAL: Final[dict[str, tuple[int | None, int | None]]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
}
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_SOCKET: Final = (41, 198)

_NEW_NAMESPACES: Final = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}. Source: linux/sched.h."""
_X32_BIT: Final = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def compile_filter(machine: str, *, also_denied: tuple[str, ...] = ()) -> bytes | None:
    """The filter as an array of `struct sock_filter`; None for a machine we have no numbers of.

    Args:
        machine: as `os.uname().machine` says.
        also_denied: names of `MEMORY_OUTSIDE_PROCESSES` to refuse as well.
    """
    if machine not in _ARCHITECTURES:
        return None
    column = list(_ARCHITECTURES).index(machine)
    table = _DENIED | {name: _OPTIONAL[name] for name in also_denied}
    numbers = [pair[column] for pair in table.values()]

    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _ARCHITECTURES[machine], yes=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(_AT_LEAST, _X32_BIT, no=1), _refuse(errno.ENOSYS)]
    for number in numbers:
        if number is not None:
            program += [_instruction(_EQUAL, number, no=1), _refuse(errno.EPERM)]
    # The C library falls back to clone, whose flags a filter can read, unlike clone3's.
    program += [_instruction(_EQUAL, _CLONE3[column], no=1), _refuse(errno.ENOSYS)]
    program += [
        _instruction(_EQUAL, _CLONE[column], no=4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, no=1),
        _refuse(errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    program += [
        _instruction(_EQUAL, _SOCKET[column], yes=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, _FIRST_ARGUMENT),
    ]
    for family in SOCKET_FAMILIES:
        program += [_instruction(_EQUAL, family, no=1), _instruction(_RETURN, _ALLOW)]
    program.append(_refuse(errno.EAFNOSUPPORT))
    return b"".join(program)


def _instruction(code: int, operand: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` say how many to skip after a test."""
    return struct.pack("=HBBI", code, yes, no, operand)


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)
