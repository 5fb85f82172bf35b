"""Calls the Redis in which several masters share their state. A call contains all requests that currently wait for a
decision.

Floor 4 (ARCHITECTURE.md). While Redis is unavailable, the store decides by itself. The log says this once, and the
daemon tries to reach Redis each second. link.py makes the connection, and cuts it if Redis does not answer in time or
sends an invalid reply (docs/decisions/0017-redis.md).
"""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import TYPE_CHECKING, Any

import structlog

from counterd.cluster.lease_protocol import shown
from counterd.control.config.keys import split_redis
from counterd.control.config.loading import ConfigError
from counterd.control.link import Link, LinkFailed, Login, Place, connect
from counterd.control.parts import Part
from counterd.control.resp_size_guard import Bounds
from counterd.control.tls import TLSError, make_client_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.contract import ProtocolSpec, SharedSource, Store
    from counterd.control.config.loading import Config
    from counterd.net.driver import Driver

log = structlog.get_logger()

RETRY_S = 1.0  # before a Redis that did not answer is tried again


class RedisState(Part):
    """Calls Redis for one store. The order of calls is: start(), then turn() in each turn of the driver, then stop().

    report: called with a cause and a sentence, as in net.server. failing: why Redis is unavailable, or "". Raises
    ConfigError if the file of authorities cannot be read.
    """

    def __init__(
        self, spec: ProtocolSpec, config: Config, store: Store, driver: Driver, report: Callable[[str, str], None]
    ) -> None:
        assert spec.shared is not None
        self.failing = ""
        address = split_redis(config.values[spec.shared.address])
        try:
            tls = make_client_context(address.ca_file) if address.is_tls else None
        except TLSError as error:
            raise ConfigError([f"{config.place(spec.shared.address)}: {error}"]) from None
        self._place = Place(address.host, address.port)
        self._login = Login(address.user, address.password, tls, address.database)
        self._source: SharedSource = importlib.import_module(spec.shared.source)
        self._script = self._source.SCRIPT.encode()
        self._digest = ""  # of the script
        self._store = store
        self._driver = driver
        self._report = report
        self._link: Link | None = None  # while Redis decides
        self._ended = asyncio.Event()
        self._batch: tuple[list[bytes], list[bytes | int]] | None = None  # of the call that is not answered yet
        self._has_reloaded = False  # the script, for this call
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts to connect to Redis. Until there is a connection, the store decides by itself."""
        self._source.alone(self._store, time.monotonic_ns())
        self._task = asyncio.get_running_loop().create_task(self._run())

    def turn(self, now_ns: int) -> None:
        """Sends the waiting requests to Redis, unless another call is in progress.

        The driver of the store calls this in each turn.
        """
        if self._batch is None and self._link is not None:
            self._call(self._link, now_ns)

    def stop(self) -> None:
        """Stops the calls to Redis."""
        if self._task is not None:
            self._task.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.cut("closed")

    # ---- inside ----

    async def _run(self) -> None:
        while True:
            self._ended.clear()
            try:
                self._begin(await self._connect())
                await self._ended.wait()
            except LinkFailed as error:
                self._give_up(str(error))
            except Exception as error:  # noqa: BLE001 - a bug, despite which throttling must continue
                what = {"message": "failed to call Redis", "exception": error}
                asyncio.get_running_loop().call_exception_handler(what)
                self._give_up(str(error))
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> Link:
        """Returns a connection to a Redis that knows the script. Raises LinkFailed."""
        link = await connect(self._place, self._login, self._lost, Bounds(self._source.ANSWER_MAX, 1))
        try:
            self._digest = await link.load(self._script)
        except BaseException as error:
            link.cut(str(error))
            raise
        return link

    def _begin(self, link: Link) -> None:
        if self.failing:
            log.info("Redis is available again, and decides about requests again")
            self.failing = ""
        self._link = link
        self._source.begin(self._store, time.monotonic_ns())

    def _call(self, link: Link, now_ns: int) -> None:
        """Makes the next call, if requests wait."""
        self._batch = self._source.take(self._store, now_ns)
        if self._batch is not None:
            self._has_reloaded = False
            self._send(link, self._batch)

    def _send(self, link: Link, batch: tuple[list[bytes], list[bytes | int]]) -> None:
        keys, arguments = batch
        link.send(self._answered, "EVALSHA", self._digest, len(keys), *keys, *arguments)

    def _answered(self, found: Any) -> None:
        """Sends the next call, and then applies the answer to the last one."""
        link, batch = self._link, self._batch
        if link is None or batch is None:  # _lost() has said so
            return
        if isinstance(found, Exception):
            if not str(found).startswith("NOSCRIPT") or self._has_reloaded:
                link.cut(str(found))
                return
            self._has_reloaded = True
            link.send(lambda _: None, "SCRIPT", "LOAD", self._script)
            self._send(link, batch)
            return
        self._call(link, time.monotonic_ns())
        try:
            self._source.settle(self._store, found, time.monotonic_ns())
        except ValueError as error:
            link.cut(f"{error}: {shown(found)}")
        self._driver.wake()

    def _lost(self, link: Link) -> None:
        """Called when a connection ends."""
        if link is self._link:
            self._give_up(link.why)
            self._ended.set()

    def _give_up(self, why: str) -> None:
        """Lets the store decide by itself: about the requests of the failed call, and about all later requests."""
        self._link = self._batch = None
        why = f"{self._place}: {why}"
        if not self.failing:
            self._report("shared", f"Redis is unavailable, so this master decides by itself: {why}")
        self.failing = why
        self._source.alone(self._store, time.monotonic_ns())
        self._driver.wake()
