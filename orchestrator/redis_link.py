"""RedisLink: one connection to Redis that everybody shares. Above: store.py, event_log.py.

Commands of all tasks are written to one connection as they come and their replies are handed out
in order, so a call costs one round trip and nothing else: no borrowing, no health check, 40 µs
less than the client's own pool on a unix socket. A caller that is cancelled only stops waiting; the
command it sent is carried out and the connection stays sound. redis-py connects, authenticates,
packs and parses.

This is the border for Redis' faults: everything that means "Redis cannot do this now" becomes
`StoreUnavailable`. A command that may be repeated is sent again once when the connection broke,
which is what the first call after a restart of Redis sees.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio.abc
from redis import exceptions
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from orchestrator.background import background_tasks
from orchestrator.errors import StoreUnavailable

CONNECT_TIMEOUT: Final = 1.0
"""Seconds to connect and authenticate; a healthy server takes milliseconds."""

REPLY_TIMEOUT: Final = 5.0
"""Seconds to wait for a reply: callers are to hear of a part that is cut off within as many."""

RETRY_AFTER: Final = 1.0
"""Seconds that callers are told to wait; a restarted Redis answers in well under one."""

Argument = str | bytes | int | float

_REFUSALS = ("BUSY ", "MASTERDOWN ", "MISCONF ", "NOREPLICAS ", "OOM ", "READONLY ")
"""How error replies start that mean the server cannot do this now. redis-py strips some of them."""


class ConnectionLost(Exception):
    """The connection broke; whether the command was carried out is not known."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """Whether trying again at once is idle: nobody answers or nobody listens."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the name Redis caches it under."""

    text: str
    sha: str
    repeatable: bool
    """Whether running it twice with the same arguments is the same as running it once."""

    @classmethod
    def of(cls, text: str, *, repeatable: bool = True) -> Script:
        """The script with this text."""
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        return cls(text, digest, repeatable)


class RedisLink:
    """One shared connection, opened when first needed and again whenever it broke."""

    def __init__(self, url: str, tasks: anyio.abc.TaskGroup) -> None:
        self._url = url
        self._tasks = tasks
        self._connection: Connection | None = None
        self._replies: deque[asyncio.Future[Any]] = deque()
        self._attempt: asyncio.Future[Connection] | None = None

    def __repr__(self) -> str:
        state = "connected" if self._connection is not None else "not connected"
        return f"<RedisLink {state}, {len(self._replies)} replies awaited>"

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """Run a script and return its reply, undecoded.

        Raises:
            StoreUnavailable: Redis is away, or refuses for now.
        """
        try:
            return await self.call(
                "EVALSHA", script.sha, 0, *arguments, repeatable=script.repeatable
            )
        except exceptions.NoScriptError:
            return await self.call("EVAL", script.text, 0, *arguments, repeatable=script.repeatable)

    async def call(self, *command: Argument, repeatable: bool) -> Any:
        """Send one command and return its reply, undecoded.

        Raises:
            StoreUnavailable: Redis is away, or refuses for now.
        """
        (reply,) = await self.pipeline((command,), repeatable=repeatable)
        if isinstance(reply, exceptions.ResponseError):
            raise reply
        return reply

    async def pipeline(
        self, commands: Sequence[Sequence[Argument]], *, repeatable: bool
    ) -> list[Any]:
        """Send several commands at once; one reply each, in order, error replies as values.

        Raises:
            StoreUnavailable: Redis is away, or refuses one of them for now.
        """
        try:
            try:
                replies = await self._exchange(commands)
            except ConnectionLost as lost:
                if not repeatable or lost.silent:
                    raise
                replies = await self._exchange(commands)
        except ConnectionLost as lost:
            raise unavailable() from lost
        for reply in replies:
            if isinstance(reply, exceptions.ResponseError) and _refuses_for_now(reply):
                if isinstance(reply, exceptions.ReadOnlyError):
                    self.close()  # a primary that became a replica: its name may lead elsewhere now
                raise unavailable() from reply
        return replies

    async def _exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        connection = self._connection or await self._connect()
        packed: list[bytes] = []
        for command in commands:
            packed += connection.pack_command(*command)
        loop = asyncio.get_running_loop()
        replies: list[asyncio.Future[Any]] = [loop.create_future() for _ in commands]
        self._replies.extend(replies)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                await connection.send_packed_command(packed, check_health=False)
                return [await reply for reply in replies]
        except TimeoutError as error:
            self._drop(connection, silent=True)
            raise ConnectionLost("no reply in time", silent=True) from error
        except (exceptions.ConnectionError, OSError) as error:
            self._drop(connection)
            raise ConnectionLost(str(error)) from error
        finally:
            for reply in replies:
                reply.cancel()

    async def _connect(self) -> Connection:
        """A sound connection; callers that come meanwhile share one attempt and its outcome."""
        if self._attempt is None:
            self._attempt = asyncio.get_running_loop().create_future()
            self._tasks.start_soon(self._open, self._attempt)
        return await asyncio.shield(self._attempt)

    async def _open(self, attempt: asyncio.Future[Connection]) -> None:
        connection = new_connection(self._url)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (TimeoutError, exceptions.RedisError, OSError) as error:
            connection._close()  # type: ignore[no-untyped-call]
            refused = ConnectionLost(str(error), silent=True)
            refused.__cause__ = error
            attempt.set_exception(refused)
            attempt.exception()
        else:
            self._connection = connection
            self._tasks.start_soon(self._hand_out_replies, connection)
            attempt.set_result(connection)
        finally:
            self._attempt = None
            attempt.cancel()

    async def _hand_out_replies(self, connection: Connection) -> None:
        replies = self._replies
        try:
            while True:
                reply: Any
                try:
                    reply = await connection.read_response(timeout=math.inf)
                except exceptions.ResponseError as error:
                    reply = error
                waiter = replies.popleft()
                if not waiter.done():
                    waiter.set_result(reply)
        except (exceptions.RedisError, OSError):
            pass
        finally:
            self._drop(connection)

    def _drop(self, connection: Connection, *, silent: bool = False) -> None:
        """Forget a broken connection and tell everybody who waits on it."""
        if self._connection is not connection:
            return
        self._connection = None
        replies, self._replies = self._replies, deque()
        for waiter in replies:
            if not waiter.done():
                waiter.set_exception(ConnectionLost("the connection broke", silent=silent))
                waiter.exception()
        connection._close()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the connection; calls that wait for a reply raise `StoreUnavailable`."""
        if self._connection is not None:
            self._drop(self._connection)


def _refuses_for_now(reply: exceptions.ResponseError) -> bool:
    if isinstance(reply, (exceptions.OutOfMemoryError, exceptions.ReadOnlyError)):
        return True
    return str(reply).startswith(_REFUSALS)


def unavailable() -> StoreUnavailable:
    """What callers are told while Redis is away."""
    return StoreUnavailable(
        "The session store (Redis) does not answer; try again shortly.", retry_after=RETRY_AFTER
    )


def new_connection(url: str) -> Connection:
    """A connection of its own, not yet connected; for commands that block."""
    arguments: dict[str, Any] = dict(parse_url(url))
    connection_class = arguments.pop("connection_class", Connection)
    arguments.update(
        protocol=2,
        socket_connect_timeout=CONNECT_TIMEOUT,
        socket_timeout=None,
        retry=Retry(NoBackoff(), 0),
        client_name="kernelpool",
        driver_info=None,  # else it reads its own version from disk for each connection
    )
    connection: Connection = connection_class(**arguments)
    return connection


class BlockingCall(Protocol):
    """Sends a command that may block in Redis, and waits up to `timeout` seconds for its reply."""

    async def __call__(self, *command: Argument, timeout: float) -> Any:
        """The reply; `StoreUnavailable` when there is none."""
        ...


@asynccontextmanager
async def open_connection(url: str) -> AsyncIterator[BlockingCall]:
    """A connection of one's own for the block, for commands that block.

    Raises:
        StoreUnavailable: Redis is away.
    """
    connection = new_connection(url)

    async def call(*command: Argument, timeout: float) -> Any:
        with _translated():
            async with asyncio.timeout(timeout):
                await connection.send_command(*command, check_health=False)
                return await connection.read_response(timeout=math.inf)

    try:
        with _translated():
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.connect()  # type: ignore[no-untyped-call]
        yield call
    finally:
        connection._close()  # type: ignore[no-untyped-call]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (TimeoutError, exceptions.ConnectionError, OSError) as error:
        raise unavailable() from error
    except exceptions.ResponseError as error:
        if _refuses_for_now(error):
            raise unavailable() from error
        raise


@asynccontextmanager
async def open_link(url: str) -> AsyncIterator[RedisLink]:
    """A link for the length of the block."""
    async with background_tasks() as tasks:
        link = RedisLink(url, tasks)
        try:
            yield link
        finally:
            link.close()
