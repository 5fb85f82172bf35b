"""The state of identifiers in a Redis that masters share, with the keys and the arithmetic of the original master.

Floor 2 (ARCHITECTURE.md). This module makes the calls and reads the answers. control/redis_state.py has the connection.
One call decides about requests of one domain. While Redis is unavailable, the store decides by itself, starting from
the last answers. docs/protocols/smockron.md, "Shared state", describes this state.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterd.protocols.smockron._store import SmockronStore

# Bytes: 500 numbers of 15 digits, each with a sign and a space, and what is around a string. The script has no larger
# numbers: they would have an exponent.
ANSWER_MAX = 1 << 14
TIMES = re.compile(rb"(?:-?[0-9]{1,15}(?: |\Z))*")

# A key's value is the time of the next request, in milliseconds. It is kept until one burst after the request. A time
# of 0 deletes the key. After errors the real master leaves invalid values: these count as missing, and fractions are
# cut off. From 1e14 on the real master writes numbers with an exponent. The answer is one string: this is faster than
# many numbers.
SCRIPT = """
local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local answers = {}
for index, key in ipairs(KEYS) do
  local moment = tonumber(ARGV[index + 2])
  if moment == 0 then
    redis.call('DEL', key)
    answers[index] = 0
  else
    local upcoming = tonumber(redis.call('GET', key) or nil)
    if not (upcoming and upcoming >= moment - burst and upcoming < 1e14) then
      upcoming = moment - burst
    end
    answers[index] = string.format('%d', math.floor(upcoming) + interval)
    redis.call('SET', key, answers[index], 'PXAT', string.format('%d', moment + burst))
  end
end
return table.concat(answers, ' ')
"""


def begin(store: SmockronStore, now_ns: int) -> None:
    """Lets Redis decide from now on."""
    store.share(True, now_ns)


def take(store: SmockronStore, now_ns: int) -> tuple[list[bytes], list[bytes | int]] | None:
    """Returns the keys and arguments of the next call, or None if there is no call to make."""
    found = store.take_questions(now_ns)
    if found is None:
        return None
    domain, rounded_ms, questions = found
    head = b"throttle;" + domain + b";"
    return [head + name for name, _ in questions], [*rounded_ms, *(moment_ms for _, moment_ms in questions)]


def settle(store: SmockronStore, answer: object, now_ns: int) -> None:
    """Applies the answer of Redis. Raises ValueError if the answer does not belong to the call."""
    if not isinstance(answer, bytes):
        raise ValueError("an answer that is not text")
    if not TIMES.fullmatch(answer):
        raise ValueError("an answer that is not a list of times")
    store.settle_questions([int(each) for each in answer.split()], now_ns)


def alone(store: SmockronStore, now_ns: int) -> None:
    """Lets the store decide, even about requests in a call that is in progress, because Redis is unavailable."""
    store.share(False, now_ns)
