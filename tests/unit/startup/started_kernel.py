"""A kernel with the start-up code, as a plain process over ipc, and one client of it.

`KERNELPOOL_STARTUP_PYTHON` names another interpreter to run it with; the default is the one that
runs the tests.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import zmq
import zmq.asyncio
from jupyter_client.session import Session

STARTUP = Path(__file__).parents[3] / "images" / "python" / "startup"
PYTHON = os.environ.get("KERNELPOOL_STARTUP_PYTHON", sys.executable)
DELIMITER = b"<IDS|MSG>"
BECOME = (
    "setpriv",
    "--clear-groups",
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)
"""Runs as another uid that may still read the interpreter where only root may look."""

PATIENCE = 30.0
"""Seconds for a start or a cell. Source: 1 s is usual, with two cores shared by many."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it came over the wire."""

    type: str
    id: str
    parent: str
    content: dict[str, Any]
    frames: tuple[bytes, ...]


@dataclass(slots=True)
class Outcome:
    """What one execution gave: its reply and the iopub messages that name it as their parent."""

    id: str
    reply: Message
    published: list[Message]

    @property
    def status(self) -> str:
        return str(self.reply.content["status"])

    @property
    def stdout(self) -> str:
        return text_of(self.published, "stdout")

    @property
    def stderr(self) -> str:
        return text_of(self.published, "stderr")

    @property
    def result(self) -> str | None:
        return next(
            (m.content["data"]["text/plain"] for m in self.published if m.type == "execute_result"),
            None,
        )

    @property
    def error(self) -> str | None:
        return next((m.content["ename"] for m in self.published if m.type == "error"), None)

    @property
    def message(self) -> str:
        return str(next(m.content["evalue"] for m in self.published if m.type == "error"))

    @property
    def pictures(self) -> list[str]:
        return [
            m.content["data"]["image/png"]
            for m in self.published
            if m.type == "display_data" and "image/png" in m.content["data"]
        ]


def text_of(messages: list[Message], stream: str) -> str:
    return "".join(
        m.content["text"] for m in messages if m.type == "stream" and m.content["name"] == stream
    )


@dataclass
class StartedKernel:
    """A running kernel and one client of it, whose iopub reader can be stalled."""

    directory: Path
    process: "subprocess.Popen[bytes]"
    key: bytes
    context: zmq.asyncio.Context
    published: list[Message] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)
    questions: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = Session(key=self.key)
        self.by_parent: defaultdict[str, list[Message]] = defaultdict(list)
        self.idle: set[str] = set()
        self.reading = anyio.Event()
        self.reading.set()
        self.changed = anyio.Event()
        self.readers: list[asyncio.Task[None]] = []
        self.sockets: dict[str, zmq.asyncio.Socket] = {}

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    async def connect(self) -> None:
        """Open the client's sockets and wait until the kernel knows of the subscription."""
        ports = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4}
        identity = uuid.uuid4().bytes
        for name, port in ports.items():
            socket = self.context.socket(zmq.SUB if name == "iopub" else zmq.DEALER)
            socket.linger = 0
            if name == "iopub":
                socket.setsockopt(zmq.RCVHWM, 50)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            else:
                socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(f"ipc://{self.directory}/k-{port}")
            self.sockets[name] = socket
        kept = {"iopub": self.published, "shell": self.replies, "stdin": self.questions}
        for name, messages in kept.items():
            self.readers.append(asyncio.create_task(self._read(self.sockets[name], messages)))
        while True:
            asked = await self.send("shell", "kernel_info_request", {})
            with anyio.move_on_after(1):
                await self.wait_for(partial(self.is_idle, asked))
                return

    async def disconnect(self) -> None:
        for reader in self.readers:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        for socket in self.sockets.values():
            socket.close()
        self.readers.clear()
        self.sockets.clear()

    async def _read(self, socket: zmq.asyncio.Socket, messages: list[Message]) -> None:
        while True:
            if socket is self.sockets["iopub"]:
                await self.reading.wait()
            raw = await socket.recv_multipart()
            frames = tuple(raw[raw.index(DELIMITER) + 1 :])
            parsed = self.session.deserialize(list(frames))
            message = Message(
                type=parsed["header"]["msg_type"],
                id=parsed["header"]["msg_id"],
                parent=parsed["parent_header"].get("msg_id", ""),
                content=parsed["content"],
                frames=frames,
            )
            messages.append(message)
            if messages is self.published:
                self.by_parent[message.parent].append(message)
                if message.content.get("execution_state") == "idle":
                    self.idle.add(message.parent)
            self.changed.set()
            self.changed = anyio.Event()

    def stall(self) -> None:
        self.reading = anyio.Event()

    def resume(self) -> None:
        self.reading.set()

    async def send(
        self, channel: str, kind: str, content: dict[str, Any], metadata: Any = None
    ) -> str:
        """Send a request and return its id.

        Not by `session.send`, which sends behind the back of the asynchronous socket: a reply that
        arrives just then is not noticed before the next one.
        """
        message = self.session.msg(kind, content, metadata=metadata)
        await self.sockets[channel].send_multipart(self.session.serialize(message))
        return str(message["header"]["msg_id"])

    async def execute(self, code: str, *, allow_stdin: bool = False, reset: bool = False) -> str:
        content = {"code": code, "silent": False, "allow_stdin": allow_stdin}
        metadata = {"kernelpool": {"reset": True}} if reset else {}
        return await self.send("shell", "execute_request", content, metadata=metadata)

    async def wait_for(self, condition: Callable[[], Any]) -> Any:
        while not (value := condition()):
            await self.changed.wait()
        return value

    def of(self, id: str) -> list[Message]:
        return self.by_parent[id]

    def is_idle(self, id: str) -> bool:
        return id in self.idle

    def reply_to(self, id: str) -> Message | None:
        return next((message for message in self.replies if message.parent == id), None)

    async def outcome(self, id: str) -> Outcome:
        with anyio.fail_after(PATIENCE):
            await self.wait_for(lambda: self.is_idle(id) and self.reply_to(id))
        reply = self.reply_to(id)
        assert reply is not None
        return Outcome(id, reply, self.of(id))

    async def run(self, code: str, *, allow_stdin: bool = False, reset: bool = False) -> Outcome:
        return await self.outcome(await self.execute(code, allow_stdin=allow_stdin, reset=reset))

    async def printed(self, id: str, text: str) -> None:
        """Wait until an execution has printed some text."""
        with anyio.fail_after(PATIENCE):
            await self.wait_for(lambda: text in text_of(self.of(id), "stdout"))

    async def printed_lines(self, id: str, count: int) -> None:
        """Wait until an execution has printed some number of lines."""
        await self.wait_for(lambda: text_of(self.of(id), "stdout").count("\n") >= count)

    async def asked(self, count: int) -> None:
        """Wait until the kernel has asked some number of questions."""
        await self.wait_for(lambda: len(self.questions) >= count)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    async def answer(self, text: str) -> None:
        await self.send("stdin", "input_reply", {"value": text})

    def path(self, name: str) -> Path:
        return self.directory / "data" / name


StartKernel = Callable[..., AbstractAsyncContextManager[StartedKernel]]


def _prepare(directory: Path, uid: int | None) -> bytes:
    """Write what a host writes before it starts a kernel. Return the signing key."""
    (directory / "data").mkdir()
    key = uuid.uuid4().hex
    names = ("shell", "iopub", "stdin", "control", "hb")
    connection: dict[str, str | int]
    connection = {f"{channel}_port": port for port, channel in enumerate(names, start=1)}
    connection |= {"transport": "ipc", "ip": f"{directory}/k", "key": key}
    connection |= {"signature_scheme": "hmac-sha256", "kernel_name": "python3"}
    (directory / "connection.json").write_text(json.dumps(connection), encoding="utf-8")
    if uid is not None:
        for path in (directory, directory / "data", directory / "connection.json"):
            os.chown(path, uid, uid)
    return key.encode()


def _launch(
    directory: Path, uid: int | None, options: tuple[str, ...], variables: dict[str, str]
) -> "subprocess.Popen[bytes]":
    environment = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(STARTUP),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KERNELPOOL_WORKSPACE": f"{directory}/data",
        "KERNELPOOL_HOME": f"{directory}/home",
        **{name: value.format(directory=directory) for name, value in variables.items()},
    }
    command = [PYTHON, *options, "-m", "kernelpool_startup", "-f", f"{directory}/connection.json"]
    if uid is not None:
        command = [*BECOME, f"--reuid={uid}", f"--regid={uid}", *command]
    return subprocess.Popen(
        command,
        env={name: value for name, value in environment.items() if value},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


@asynccontextmanager
async def started_kernel(
    *, uid: int | None = None, options: tuple[str, ...] = ("-P",), **variables: str
) -> AsyncIterator[StartedKernel]:
    """Start a kernel with further environment variables and connect to it."""
    in_thread = anyio.to_thread.run_sync
    temporary = await in_thread(partial(tempfile.TemporaryDirectory, prefix="kp", dir="/tmp"))
    directory = Path(temporary.name)
    context = zmq.asyncio.Context()
    try:
        key = await in_thread(_prepare, directory, uid)
        process = await in_thread(_launch, directory, uid, options, variables)
        kernel = StartedKernel(directory, process, key, context)
        try:
            with anyio.fail_after(PATIENCE):
                while not await anyio.Path(directory, "k-5").exists():
                    assert process.poll() is None, f"kernel ended with {process.returncode}"
                    await anyio.sleep(0.01)
                await kernel.connect()
            yield kernel
        finally:
            await kernel.disconnect()
            await in_thread(_end, process)
    finally:
        context.destroy(linger=0)
        await in_thread(temporary.cleanup)
