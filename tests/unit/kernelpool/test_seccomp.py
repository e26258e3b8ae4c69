from __future__ import annotations

import errno
import struct

import pytest

from kernelpool import seccomp

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def run(program: bytes, number: int, *, audit: int, argument: int = 0) -> int:
    """What a filter returns for a system call, as the kernel of the host would run it."""
    data = struct.pack("=IIQ6Q", number, audit, 0, argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, position = 0, 0
    while True:
        code, yes, no, operand = instructions[position]
        position += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
            continue
        holds = {
            0x15: accumulator == operand,
            0x35: accumulator >= operand,
            0x45: bool(accumulator & operand),
        }[code]
        position += yes if holds else no


def refused(error: int) -> int:
    return 0x00050000 | error


@pytest.mark.parametrize(
    ("machine", "read", "mount", "clone", "clone3", "socket"),
    [("x86_64", 0, 165, 56, 435, 41), ("aarch64", 63, 40, 220, 435, 198)],
)
def test_the_filter_refuses_what_reaches_around_namespaces_and_nothing_ordinary(
    machine: str, read: int, mount: int, clone: int, clone3: int, socket: int
) -> None:
    program = seccomp.compile_filter(machine)
    assert program is not None
    audit = AUDIT[machine]

    assert run(program, read, audit=audit) == ALLOWED
    assert run(program, mount, audit=audit) == refused(errno.EPERM)
    assert run(program, clone3, audit=audit) == refused(errno.ENOSYS)
    assert run(program, clone, audit=audit, argument=0x003D0F00) == ALLOWED
    assert run(program, clone, audit=audit, argument=0x10000000 | 17) == refused(errno.EPERM)
    for family in (1, 2, 10, 16):
        assert run(program, socket, audit=audit, argument=family) == ALLOWED
    for family in (17, 38, 40):
        answer = run(program, socket, audit=audit, argument=family)
        assert answer == refused(errno.EAFNOSUPPORT)


def test_calls_of_another_architecture_are_never_let_through() -> None:
    program = seccomp.compile_filter("x86_64")
    assert program is not None

    assert run(program, 165, audit=0x40000003) == KILLED
    assert run(program, 0x40000000 | 165, audit=AUDIT["x86_64"]) == refused(errno.ENOSYS)


def test_memory_outside_processes_is_refused_only_where_it_is_asked_for() -> None:
    lenient = seccomp.compile_filter("x86_64")
    strict = seccomp.compile_filter("x86_64", also_denied=seccomp.MEMORY_OUTSIDE_PROCESSES)
    assert lenient is not None
    assert strict is not None

    assert run(lenient, 319, audit=AUDIT["x86_64"]) == ALLOWED
    assert run(strict, 319, audit=AUDIT["x86_64"]) == refused(errno.EPERM)


def test_a_machine_without_known_numbers_gets_no_filter_rather_than_a_wrong_one() -> None:
    assert seccomp.compile_filter("riscv64") is None
