"""A very small part of Python, run without a kernel. Above: testing.py. Below: kernelpool's events.

Contract tests send the same code to this and to real kernels, so what is understood here means here
what it means there: assignments, `print`, `input`, `raise`, `time.sleep`, files, `os._exit`. Two
calls exist only here: `wait("name")` waits until the test opens that gate, and `break_dispatcher()`
fails the way a bug would.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio

from kernelpool.events import ErrorOutput, Event, ExecuteResult, InputRequest, Stream

Emit = Callable[[Event], None]
Ask = Callable[[InputRequest], Awaitable[str]]


class KernelGone(Exception):
    """The code ended its kernel."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class DispatcherBroken(Exception):
    """What `break_dispatcher()` raises: a fault that nobody foresaw."""


class _Raised(Exception):
    """The code raised an exception of its own."""

    def __init__(self, name: str, value: str = "") -> None:
        super().__init__(name, value)
        self.name = name
        self.value = value


class _Opened:
    """What `open` gives the code."""

    def __init__(self, path: str, mode: str) -> None:
        self.path = path
        self.mode = mode


class Gates:
    """Named events that code waits for and tests open."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    def open(self, name: str) -> None:
        """Let everything that waits here go on."""
        self._event(self._open, name).set()

    async def reached(self, name: str) -> None:
        """Wait until some code waits at this gate."""
        await self._event(self._reached, name).wait()

    async def wait(self, name: str) -> None:
        """Wait at a gate, as code does."""
        self._event(self._reached, name).set()
        await self._event(self._open, name).wait()

    def _event(self, events: dict[str, asyncio.Event], name: str) -> asyncio.Event:
        return events.setdefault(name, asyncio.Event())


class Interpreter:
    """The namespace of one pretended kernel, and what it can do."""

    def __init__(self, workspace: Path, gates: Gates) -> None:
        self.count = 0
        self.written: set[str] = set()
        """Paths below the workspace that the current code wrote."""
        self.removed: set[str] = set()
        self._workspace = workspace
        self._gates = gates
        self._names: dict[str, Any] = {}
        self._emit: Emit = lambda event: None
        self._ask: Ask | None = None

    def reset(self) -> None:
        """Forget every variable."""
        self._names.clear()

    async def run(self, code: str, emit: Emit, ask: Ask | None) -> bool:
        """Run code; False when it raised.

        Raises:
            KernelGone: it ended the kernel.
        """
        self._emit, self._ask = emit, ask
        self.written.clear()
        self.removed.clear()
        try:
            value = await self._run(code)
        except _Raised as raised:
            trace = f"Traceback (most recent call last)\n{raised.name}: {raised.value}"
            emit(ErrorOutput(raised.name, raised.value, (trace,)))
            return False
        if value is not None:
            emit(ExecuteResult({"text/plain": repr(value)}, {}, self.count))
        return True

    async def _run(self, code: str) -> Any:
        try:
            statements = ast.parse(code).body
        except SyntaxError as error:
            raise _Raised("SyntaxError", error.msg) from None
        value = None
        for statement in statements:
            value = await self._statement(statement)
        return value

    async def _statement(self, statement: ast.stmt) -> Any:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Pass():
                return None
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._names[name] = await self._value(value)
                return None
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=arguments)):
                raise _Raised(name, *[str(await self._value(item)) for item in arguments])
            case ast.While(test=ast.Constant(value=True)):
                await asyncio.Event().wait()
            case ast.For(target=ast.Name(id=name), iter=items, body=body):
                for item in await self._value(items):
                    self._names[name] = item
                    for inner in body:
                        await self._statement(inner)
                return None
            case ast.Expr(value=value):
                return await self._value(value)
        raise _Raised("NotImplementedError", ast.unparse(statement))

    async def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                if name not in self._names:
                    raise _Raised("NameError", f"name '{name}' is not defined")
                return self._names[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _operate(op, await self._value(left), await self._value(right))
            case ast.Call(func=ast.Attribute(value=target, attr=method), args=arguments):
                values = [await self._value(item) for item in arguments]
                return await self._method(target, method, values)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
                values = [await self._value(item) for item in arguments]
                options = {str(key.arg): await self._value(key.value) for key in keywords}
                return await self._function(name, values, options)
        raise _Raised("NotImplementedError", ast.unparse(node))

    async def _function(self, name: str, values: list[Any], options: dict[str, Any]) -> Any:
        match name, values:
            case "print", _:
                self._emit(Stream("stdout", " ".join(map(str, values)) + options.get("end", "\n")))
                return None
            case "input", _:
                if self._ask is None:
                    raise _Raised("StdinNotImplementedError", "nobody can answer input() here")
                return await self._ask(InputRequest("".join(values), password=False))
            case "range", _:
                return range(*values)
            case "open", [str(path), *mode]:
                return _Opened(path, mode[0] if mode else "r")
            case "wait", [str(gate)]:
                return await self._gates.wait(gate)
            case "break_dispatcher", []:
                raise DispatcherBroken
        raise _Raised("NameError", f"name '{name}' is not defined")

    async def _method(self, target: ast.expr, method: str, values: list[Any]) -> Any:
        match target, method, values:
            case ast.Name(id="time"), "sleep", [seconds]:
                return await asyncio.sleep(seconds)
            case ast.Name(id="os"), "_exit", [int(exit_code)]:
                raise KernelGone(exit_code)
            case ast.Name(id="os"), "remove", [str(path)]:
                self.removed.add(self._below(path))
                return await anyio.Path(self._workspace, self._below(path)).unlink()
        opened = await self._value(target)
        if not isinstance(opened, _Opened):
            raise _Raised("AttributeError", method)
        file = anyio.Path(self._workspace, self._below(opened.path))
        match method, values:
            case "write", [str(text)]:
                await file.parent.mkdir(parents=True, exist_ok=True)
                await file.write_text(text, encoding="utf-8")
                self.written.add(self._below(opened.path))
                return len(text)
            case "read", []:
                try:
                    return await file.read_text(encoding="utf-8")
                except FileNotFoundError:
                    raise _Raised("FileNotFoundError", opened.path) from None
        raise _Raised("AttributeError", method)

    @staticmethod
    def _below(path: str) -> str:
        return path.removeprefix("/mnt/data/")


_OPERATIONS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
}


def _operate(op: ast.operator, left: Any, right: Any) -> Any:
    try:
        return _OPERATIONS[type(op)](left, right)
    except (ArithmeticError, TypeError) as error:
        raise _Raised(type(error).__name__, str(error)) from None
