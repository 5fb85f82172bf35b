"""A Redis in memory with the authority's script: the few commands that the script uses, and a clock that the test sets.

The script itself runs in Lua 5.1, which is what Redis has. tests/simulation/test_lua_redis.py compares it with a real
Redis. Keys do not expire by themselves: expire() does that, and the script may not depend on it.
"""

from __future__ import annotations

import copy
import random
import struct
from typing import TYPE_CHECKING, Any

from lupa import lua51

from counterd.cluster import lease_protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Score = float
SCORE = {b"-inf": float("-inf"), b"+inf": float("inf")}


def text(argument: Any) -> bytes:
    """Encodes an argument as Redis receives it."""
    if isinstance(argument, bytes):
        return argument
    return argument.encode() if isinstance(argument, str) else b"%.17g" % argument


class LuaRedis:
    """now_us: the server's clock. history: its replication ID. data: hashes, sorted sets (by member) and strings, by
    key. calls: of the script, so far. commands: that these made."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = now_us
        self.history = "0"
        self.data: dict[bytes, Any] = {}
        self.expires_us: dict[bytes, int] = {}
        self.calls = self.commands = 0
        self.random = random.Random(1)  # for HRANDFIELD
        lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._table: Callable[[Sequence[Any]], Any] = lua.table_from
        tick = lease_protocol.script()
        script = b"local redis, struct = ...; local KEYS, ARGV; return function(KEYS, ARGV) %b end" % tick
        self._tick = lua.execute(
            script, lua.table_from({b"call": self._call}), lua.table_from({b"pack": struct.pack, b"unpack": unpack})
        )
        self._commands: dict[bytes, Callable[..., Any]] = {
            name.upper().encode(): getattr(self, name) for name in COMMANDS
        } | {b"DEL": self.del_}

    def tick(self, keys: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
        """A call of the script, and its answer."""
        self.calls += 1
        found = self._tick(*(self._table([text(each) for each in given]) for given in (keys, arguments)))
        return reply(found)

    def expire(self) -> None:
        """Removes keys that have expired."""
        for key in [key for key, until_us in self.expires_us.items() if until_us <= self.now_us]:
            del self.expires_us[key], self.data[key]

    def snapshot(self) -> Any:
        return copy.deepcopy((self.data, self.expires_us))

    def restore(self, snapshot: Any) -> None:
        self.data, self.expires_us = copy.deepcopy(snapshot)

    # ---- commands ----

    def _call(self, command: bytes, *arguments: Any) -> Any:
        self.commands += 1
        found = self._commands[command](*map(text, arguments))
        return self._table(found) if isinstance(found, list) else found

    def _drop_empty(self, key: bytes) -> None:
        if key in self.data and not self.data[key]:
            self.del_(key)

    def time(self) -> Any:
        return [b"%d" % part for part in divmod(self.now_us, 1_000_000)]

    def info(self, _section: bytes) -> bytes:
        assert self.history.isalnum()
        return b"role:master\r\nmaster_replid:%b\r\nmaster_replid2:1\r\n" % self.history.encode()

    def exists(self, key: bytes) -> int:
        return int(key in self.data)

    def del_(self, key: bytes) -> int:
        self.expires_us.pop(key, None)
        return int(self.data.pop(key, None) is not None)

    def get(self, key: bytes) -> bytes | bool:
        return self.data.get(key, False)

    def set(self, key: bytes, value: bytes, _px: bytes, milliseconds: bytes) -> bytes:
        self.data[key] = value
        self.expires_us[key] = self.now_us + int(milliseconds) * 1000
        return b"OK"

    def pexpire(self, key: bytes, milliseconds: bytes) -> int:
        if key in self.data:
            self.expires_us[key] = self.now_us + int(milliseconds) * 1000
        return int(key in self.data)

    def hget(self, key: bytes, field: bytes) -> bytes | bool:
        return self.data.get(key, {}).get(field, False)

    def hmget(self, key: bytes, *fields: bytes) -> list[bytes | bool]:
        found = self.data.get(key, {})
        return [found.get(field, False) for field in fields]

    def hset(self, key: bytes, *pairs: bytes) -> int:
        found = self.data.setdefault(key, {})
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def hdel(self, key: bytes, *fields: bytes) -> int:
        gone = [self.data.get(key, {}).pop(field, None) for field in fields]
        self._drop_empty(key)
        return len(gone) - gone.count(None)

    def hincrby(self, key: bytes, field: bytes, by: bytes) -> int:
        value = int(self.data.setdefault(key, {}).get(field, b"0")) + int(by)
        self.data[key][field] = b"%d" % value
        return value

    def hrandfield(self, key: bytes, count: bytes, _with_values: bytes) -> list[bytes]:
        found = self.data.get(key, {})
        names = self.random.sample(list(found), min(int(count), len(found)))
        return [each for name in names for each in (name, found[name])]

    def zadd(self, key: bytes, *arguments: bytes) -> int:
        only_known = arguments[0] == b"XX"
        arguments = arguments[only_known:]
        found = self.data.setdefault(key, {})
        before = len(found)
        for score, member in zip(arguments[::2], arguments[1::2], strict=True):
            if not only_known or member in found:
                found[member] = float(score)
        self._drop_empty(key)
        return len(self.data.get(key, ())) - before

    def zrem(self, key: bytes, member: bytes) -> int:
        return self.hdel(key, member)

    def zscore(self, key: bytes, member: bytes) -> bytes | bool:
        found = self.data.get(key, {})
        return text(found[member]) if member in found else False

    def _sorted(self, key: bytes) -> list[tuple[Score, bytes]]:
        return sorted((score, member) for member, score in self.data.get(key, {}).items())

    def _between(self, key: bytes, low: bytes, high: bytes) -> list[bytes]:
        least, most = (SCORE[each] if each in SCORE else float(each.lstrip(b"(")) for each in (low, high))
        found = self._sorted(key)
        return [m for score, m in found if least <= score <= most and not (low[:1] == b"(" and score == least)]

    def zrange(self, key: bytes, first: bytes, last: bytes) -> list[bytes]:
        return [member for _, member in self._sorted(key)[int(first) : int(last) + 1]]

    def zcard(self, key: bytes) -> int:
        return len(self.data.get(key, ()))

    def zrangebyscore(self, key: bytes, low: bytes, high: bytes, *limit: bytes) -> list[bytes]:
        return self._between(key, low, high)[: int(limit[2]) if limit else None]

    def zrevrangebyscore(self, key: bytes, high: bytes, low: bytes, *limit: bytes) -> list[bytes]:
        return self._between(key, low, high)[::-1][: int(limit[2]) if limit else None]

    def zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> int:
        return self.hdel(key, *self._between(key, low, high))


COMMANDS = (
    "time", "info", "exists", "get", "set", "pexpire", "hget", "hmget", "hset", "hdel", "hincrby", "hrandfield", "zadd",
    "zrem", "zscore", "zrange", "zcard", "zrangebyscore", "zrevrangebyscore", "zremrangebyscore",
)  # fmt: skip


def unpack(form: bytes, packed: bytes) -> tuple[Any, ...]:
    """As Redis' struct.unpack, which also returns the position after the data."""
    return *struct.unpack(form, packed), len(packed) + 1


def reply(found: Any) -> Any:
    """A value of Lua as a client gets it."""
    if lua51.lua_type(found) == "table":
        return [reply(found[index]) for index in range(1, len(found) + 1)]
    return int(found) if isinstance(found, float) else found
