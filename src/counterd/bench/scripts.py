"""What redis is asked to run where a load compares it with a sentinel room: the usual scripts, and no cleverer ones.

A side, pure Python. Time is the server's own, as clients' clocks differ. KEYS[1] is what is limited, ARGV[1] the limit,
ARGV[2] milliseconds; all answer 1 or 0. A permit is given back with a plain ZREM.

acquire  a leased semaphore: a sorted set of those that hold a permit (ARGV[3]), by when their lease ends
flow     a sliding window: a sorted set of all requests that passed, by when they came
counts   estimates that from the numbers of this window and the last, which costs less and is sometimes wrong
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from counterd.bench.asking import LoadError

if TYPE_CHECKING:
    from counterd.bench.asking import Place

LEASE_MS = 4000  # a sentinel room's, if its rules do not say otherwise
WINDOW_MS = 1000
LINE_MAX = 1000

SCRIPTS = {
    "acquire": b"""\
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then
  return 0
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
return 1
""",
    "flow": b"""\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2] * 1000)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then
  return 0
end
redis.call('ZADD', KEYS[1], now, now)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
""",
    "counts": b"""\
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local length = tonumber(ARGV[2])
local number = math.floor(now / length)
local key = KEYS[1] .. ':' .. number
local last = tonumber(redis.call('GET', KEYS[1] .. ':' .. number - 1) or 0)
local this = tonumber(redis.call('GET', key) or 0)
if last * (1 - now % length / length) + this >= tonumber(ARGV[1]) then
  return 0
end
if redis.call('INCR', key) == 1 then
  redis.call('PEXPIRE', key, 2 * length)
end
return 1
""",
}


def digest(script: str) -> bytes:
    """What EVALSHA calls it by."""
    return hashlib.sha1(SCRIPTS[script], usedforsecurity=False).hexdigest().encode()


def resp(*words: bytes) -> bytes:
    """A request of redis."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def install(place: Place) -> None:
    """Has the server know all of them. LoadError: it does not take them."""
    with place.connect() as connection, connection.makefile("rwb") as stream:
        for script, text in SCRIPTS.items():
            stream.write(resp(b"SCRIPT", b"LOAD", text))
            stream.flush()
            said = stream.readline(LINE_MAX)
            said = stream.readline(LINE_MAX) if said == b"$40\r\n" else said
            if said.strip() != digest(script):
                raise LoadError(f"the server does not take scripts: {said!r}")
