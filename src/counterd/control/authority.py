"""Calls the Redis in which several masters share their state. A call contains all requests that currently wait for a
decision.

Floor 4 (ARCHITECTURE.md). While Redis is unavailable, the store decides by itself. The log says this once, and the
daemon tries to reach Redis each second. The package redis-py makes the connection (docs/decisions/0017-redis.md); the
extra `redis` installs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import time
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from redis.asyncio.connection import AbstractConnection

    from counterd.contract import Room, SharedSource, Store
    from counterd.net.driver import Driver

log = structlog.get_logger()

PATIENCE_S = 1.0  # for an answer, and for a connection
RETRY_S = 1.0  # before a Redis that did not answer is tried again


class Authority:
    """Calls Redis for one store. The order of calls is: start(), then turn() in each turn of the driver, then stop().

    values: the values of the settings, by key. report: called with a cause and a sentence, as in net.server.
    failing: why Redis is unavailable, or "".
    """

    def __init__(
        self,
        room: Room,
        values: Mapping[str, Any],
        store: Store,
        driver: Driver,
        report: Callable[[str, str], None],
    ) -> None:
        import hiredis  # noqa: PLC0415 - only in an extra; the check of the configuration has found it installed
        import redis.asyncio  # noqa: PLC0415
        from redis.exceptions import NoScriptError, RedisError  # noqa: PLC0415

        assert room.shared is not None
        self.failing = ""
        self._errors = (RedisError, OSError, ValueError, asyncio.TimeoutError)
        self._unknown = NoScriptError
        self._pack = hiredis.pack_command  # redis-py's own function would take most of the time of a call
        self._source: SharedSource = importlib.import_module(room.shared.source)
        self._redis = redis.asyncio.from_url(
            values[room.shared.address],
            socket_timeout=PATIENCE_S,
            socket_connect_timeout=PATIENCE_S,
            single_connection_client=True,
        )
        self._digest = hashlib.sha1(self._source.SCRIPT.encode(), usedforsecurity=False).hexdigest()
        self._store = store
        self._driver = driver
        self._report = report
        self._wanted = asyncio.Event()
        self._batch: tuple[list[bytes], list[bytes | int]] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to connect to Redis. Until there is a connection, the store decides by itself."""
        self._source.alone(self._store, time.monotonic_ns())
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def turn(self, now_ns: int) -> None:
        """Sends the waiting requests to Redis, unless another call is in progress.

        The driver of the store calls this in each turn.
        """
        if self._batch is None:
            self._batch = self._source.take(self._store, now_ns)
            if self._batch is not None:
                self._wanted.set()

    def stop(self) -> None:
        """Stops the calls to Redis."""
        if self._task is not None:
            self._task.cancel()

    # ---- inside ----

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await asyncio.wait_for(self._redis.ping(), PATIENCE_S)
                    self._begin()
                    while True:
                        await self._ask()
                except self._errors as error:
                    self._give_up(error)
                except Exception as error:  # noqa: BLE001 - a bug, despite which throttling must continue
                    self._loop.call_exception_handler({"message": "failed to call Redis", "exception": error})
                    self._give_up(error)
                await asyncio.sleep(RETRY_S)
        finally:
            await self._redis.aclose()

    def _begin(self) -> None:
        if self.failing:
            log.info("Redis is available again, and decides about requests again")
            self.failing = ""
        self._source.begin(self._store, time.monotonic_ns())

    async def _ask(self) -> None:
        """Makes calls while requests wait. Sends the next call before it applies the answer to the last one."""
        await self._wanted.wait()
        self._wanted.clear()
        await self._send()
        while self._batch is not None:
            answer = await asyncio.wait_for(self._answer(), PATIENCE_S)
            self._batch = self._source.take(self._store, time.monotonic_ns())
            if self._batch is not None:
                await self._send()
            self._source.settle(self._store, answer, time.monotonic_ns())
            self._driver.wake()

    async def _send(self) -> None:
        assert self._batch is not None
        keys, arguments = self._batch
        packed = self._pack(("EVALSHA", self._digest, len(keys), *keys, *arguments))  # type: ignore[arg-type]
        await self._connection.send_packed_command(packed)

    async def _answer(self) -> object:
        """Reads the answer of the Lua script. Loads the script into Redis if Redis does not have it."""
        try:
            return await self._connection.read_response()
        except self._unknown:
            await self._redis.script_load(self._source.SCRIPT)
        await self._send()
        return await self._connection.read_response()

    @property
    def _connection(self) -> AbstractConnection:
        connection = self._redis.connection
        assert connection is not None
        return connection

    def _give_up(self, error: Exception) -> None:
        """Lets the store decide by itself: about the requests of the failed call, and about all later requests."""
        silent = isinstance(error, asyncio.TimeoutError)
        why = f"no answer for {PATIENCE_S:g} s" if silent else str(error) or type(error).__name__
        if not self.failing:
            self._report("shared", f"Redis is unavailable, so this master decides by itself: {why}")
        self.failing = why
        self._source.alone(self._store, time.monotonic_ns())
        self._batch = None
        self._wanted.clear()
        self._driver.wake()
