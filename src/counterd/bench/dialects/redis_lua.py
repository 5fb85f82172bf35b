"""Redis with the usual scripts for semaphores and rates, as counterbench uses it.

Floor 5 (ARCHITECTURE.md), pure Python. The scripts use the server's time, because the clocks of clients differ.
KEYS[1] is the key of the limited thing, ARGV[1] the limit, ARGV[2] a number of milliseconds. All scripts return 1 or 0.
A permit is given back with a plain ZREM.

acquire  a leased semaphore: a sorted set of those that hold a permit (ARGV[3]), by when their lease ends
flow     a sliding window: a sorted set of all requests that passed, by their time
counts   the same, estimated from the counts of this window and the last one: costs less, and is sometimes wrong
gcra     a rate by the theoretical arrival time of its next unit. ARGV[1] is the limit a second, ARGV[2] the burst. A
         second is as many ticks as the limit: so a unit lasts exactly one tick, whatever the limit is
take     several items at once, or none of them: ARGV[1] counters without holders, and rates as in gcra
give     the counters of a take are given back

With items, acquire and release are gcra (of one rate), or take and give.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from counterd.bench.connection import LoadError
from counterd.bench.dialect import ACQUIRE, GRANTED, NAMED, NOOP, RELEASE, Dialect, Op
from counterd.bench.dialects.redis import resp

if TYPE_CHECKING:
    from counterd.bench.connection import Place
    from counterd.bench.dialect import Mistakes
    from counterd.bench.options import Options
    from counterd.bench.takes import Take

TOKEN = b"t" * 16  # stands for a token, in hexadecimal
LEASE_MS = 4000  # the default of a lease in counterd
WINDOW_MS = 1000
# Lua's numbers are exact up to 2^53, and the ticks since 1970 are 2^31 seconds in the year 2038.
LIMIT_MAX = (1 << 53) // (1 << 31)
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
    "gcra": b"""\
local time = redis.call('TIME')
local limit = tonumber(ARGV[1])
local now = time[1] * limit + time[2] * limit / 1000000
local arrival = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now) + 1
if arrival - now > tonumber(ARGV[2]) then
  return 0
end
redis.call('SET', KEYS[1], arrival, 'PX', math.ceil((arrival - now) * 1000 / limit))
return 1
""",
    "take": b"""\
local time = redis.call('TIME')
local counters = tonumber(ARGV[1])
local limit = tonumber(ARGV[4])
local now = time[1] * limit + time[2] * limit / 1000000
local arrivals = {}
for i = 1, counters do
  if (redis.call('GET', KEYS[i]) or 0) + ARGV[2] > tonumber(ARGV[3]) then
    return 0
  end
end
for i = counters + 1, #KEYS do
  arrivals[i] = math.max(tonumber(redis.call('GET', KEYS[i]) or 0), now) + 1
  if arrivals[i] - now > tonumber(ARGV[5]) then
    return 0
  end
end
for i = 1, counters do
  redis.call('INCRBY', KEYS[i], ARGV[2])
end
for i = counters + 1, #KEYS do
  redis.call('SET', KEYS[i], arrivals[i], 'PX', math.ceil((arrivals[i] - now) * 1000 / limit))
end
return 1
""",
    "give": b"""\
for i = 1, #KEYS do
  redis.call('DECRBY', KEYS[i], ARGV[1])
end
return 1
""",
}


def digest(script: str) -> bytes:
    """Returns the digest by which EVALSHA identifies a script."""
    return hashlib.sha1(SCRIPTS[script], usedforsecurity=False).hexdigest().encode()


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request for a name. Each script has its own key for a name."""
    limit, lease, window = b"%d" % plan.maximum, b"%d" % LEASE_MS, b"%d" % WINDOW_MS
    held = b"held:" + name
    requests = {
        "noop": resp(b"PING"),
        "acquire": resp(b"EVALSHA", digest("acquire"), b"1", held, limit, lease, TOKEN),
        "release": resp(b"ZREM", held, TOKEN),
        "flow": resp(b"EVALSHA", digest("flow"), b"1", b"flow:" + name, limit, window),
        "counts": resp(b"EVALSHA", digest("counts"), b"1", b"counts:" + name, limit, window),
    }
    return requests if plan.take is None else {**requests, **takes_of(plan, plan.take, name)}


def takes_of(plan: Options, take: Take, name: bytes) -> dict[str, bytes]:
    """Returns the requests that acquire and release several items. A plan that has only rates has no release."""
    counters, rates = take.items.names(name)
    keys = [*(b"used:" + each for each in counters), *(b"rate:" + each for each in rates)]
    limit, burst = b"%d" % take.per_second, b"%d" % take.units_max
    if len(keys) == len(rates) == 1:
        return {"acquire": resp(b"EVALSHA", digest("gcra"), b"1", *keys, limit, burst)}
    permits, maximum, count = b"%d" % plan.resources, b"%d" % plan.maximum, b"%d" % len(counters)
    taken = [digest("take"), b"%d" % len(keys), *keys, count, permits, maximum, limit, burst]
    given = [digest("give"), count, *keys[: len(counters)], permits]
    return {"acquire": resp(b"EVALSHA", *taken), "release": resp(b"EVALSHA", *given)}


def mistakes_of(plan: Options) -> Mistakes:
    """Returns a mistake if a script cannot reckon exactly with the limit of a rate."""
    take = plan.take
    return [
        (
            take is not None and take.items.rates > 0 and take.per_second > LIMIT_MAX,
            f"with redis-lua the limit of a rate must be 1 to {LIMIT_MAX} a second",
        )
    ]


def install(place: Place) -> None:
    """Loads all scripts into the server. Raises LoadError if the server refuses one."""
    with place.connect() as connection, connection.makefile("rwb") as stream:
        for script, text in SCRIPTS.items():
            stream.write(resp(b"SCRIPT", b"LOAD", text))
            stream.flush()
            said = stream.readline(LINE_MAX)
            said = stream.readline(LINE_MAX) if said == b"$40\r\n" else said
            if said.strip() != digest(script):
                raise LoadError(f"the server does not accept scripts: {said!r}")


DIALECT = Dialect(
    name="redis-lua",
    order=6,
    port=6379,
    ops={"noop": NOOP, "acquire": ACQUIRE, "release": RELEASE, "flow": Op(options=GRANTED), "counts": Op()},
    ops_help=(
        "acquire-release (a leased semaphore; with --items a script for all of them), flow (a sliding window), "
        "counts (the same, estimated)"
    ),
    requests=requests_of,
    name_size_max=65535,
    options=NAMED | {"items"},
    mistakes=mistakes_of,
    tokens="chosen",
    prepare=install,
)
