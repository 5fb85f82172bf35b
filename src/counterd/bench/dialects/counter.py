"""The counter protocol for counterbench: its requests, and the checks whether the server has kept its promises.

Floor 5 (ARCHITECTURE.md), pure Python. The load processes count what is certainly held (granted, and its release
not sent). This file compares these numbers with a Dump. While the connections are open, the server must count exactly
as much. After they were closed, the server must have taken everything back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from counterd.bench.connection import LoadError, bounded, context_of
from counterd.bench.dialect import COUNTING, NAMED, TAKING, Checks, Dialect, Op
from counterd.client import Client
from counterd.errors import CounterdError
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from counterd.bench._board import Board
    from counterd.bench.dialect import Mistakes
    from counterd.bench.options import Options
    from counterd.client import DumpEntry

GIVE_BACK_S = 30.0
SECOND_US = 1_000_000
# The names that fit into a Take with the most items and a key.
NAMES_SIZE_MAX = wire.TAKE_MAX - 10 - wire.KEY_MAX - 24 * wire.ITEMS_MAX
PAUSE_S = 0.01

State = dict[bytes, "DumpEntry"]


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request for a name. The opaque is filled in later."""
    requests = {"noop": wire.noop(0), "get": wire.get(0, name)}
    if plan.take is None:
        requests["acquire"] = wire.acquire(0, name, plan.resources, plan.maximum)
    else:
        requests |= {"acquire": take_of(plan, 0, name), "cancel": wire.cancel(0, 0)}
    if plan.holds_permits():
        requests["release"] = b"".join(wire.release(0, each, plan.resources) for each in _counters(plan, name))
    return requests


def take_of(plan: Options, key: int, name: bytes) -> bytes:
    """Returns a Take of the items of the plan for a name, with the fairness key of this number."""
    assert plan.take is not None
    counters, rates = plan.take.items.names(name)
    items: list[wire.Permit | wire.Rate] = [wire.Permit(each, plan.resources, plan.maximum) for each in counters]
    items += [wire.Rate(each, 1, plan.take.per_second, SECOND_US, plan.take.units_max) for each in rates]
    return wire.take(
        0,
        items,
        round(plan.take.wait * 1000),
        key=b"key %d" % key if plan.take.keys else b"",
        weight=plan.take.weight(key),
        priority=plan.take.priority(key),
    )


def mistakes_of(plan: Options) -> Mistakes:
    if plan.take is None:
        return []
    items = plan.take.items
    size = sum(len(name) for names in items.names(b"n" * plan.name_size) for name in names)
    return [
        (size > NAMES_SIZE_MAX, f"the names of a Take can have at most {NAMES_SIZE_MAX} bytes together, not {size}"),
        (0 < plan.take.wait < 0.001, "a Take can wait only whole milliseconds, at least one"),
    ]


def _counters(plan: Options, name: bytes) -> list[bytes]:
    """Returns the names of the counters whose permits an acquire of this name takes."""
    return [name] if plan.take is None else plan.take.items.names(name)[0]


# ---- --verify -------------------------------------------------------------------------------------------------------


def checks_of(plan: Options) -> Checks:
    """Reads what exists before the load. Raises LoadError if the server has no Dump."""
    try:
        before = look(plan)
    except CounterdError as error:
        raise LoadError(f"--verify needs a reply to Dump: {error}") from None
    return Checks(lambda board: while_held(plan, board, before), lambda _: when_gone(plan, before))


def look(plan: Options) -> State:
    """Returns what the server says about the names of a plan. Raises an error of counterd.errors."""
    with _client(plan) as client:
        return {entry.name: entry for entry in client.dump() if _is_ours(plan, entry.name)}


def while_held(plan: Options, board: Board, before: State) -> list[str]:
    """Returns the violations while no request is in flight and all connections are open, except those that died. What
    these held may take up to GIVE_BACK_S to come back.
    """
    held = {
        name: resources
        for number, resources in board.all_held().items()
        for name in _counters(plan, _name(plan, number))
    }
    end = time.monotonic() + GIVE_BACK_S
    while True:
        now = look(plan)
        found, is_final = _compare(plan, now, held, before)
        if is_final or time.monotonic() > end:
            return bounded(found)
        time.sleep(PAUSE_S)


def _compare(plan: Options, now: State, held: dict[bytes, int], before: State) -> tuple[list[str], bool]:
    """Returns the violations, and whether waiting makes no difference."""
    found = []
    is_final = True
    for name in sorted(now.keys() | held.keys()):
        used = now[name].consumption if name in now else 0
        ours = held.get(name, 0) + (before[name].consumption if name in before else 0)
        if used != ours:
            found.append(f"{_shown(name)}: {used} in use, but {ours} are held")
            is_final &= used < ours
        bound = max(plan.maximum, before[name].peak if name in before else 0)
        if name in now and now[name].peak > bound:
            found.append(f"{_shown(name)}: {now[name].peak} were in use, with a maximum of {bound}")
    return found, is_final


def when_gone(plan: Options, before: State) -> list[str]:
    """Returns the violations after all connections were closed: everything that is not given back after GIVE_BACK_S."""
    end = time.monotonic() + GIVE_BACK_S
    while True:
        kept = {
            name: entry.consumption
            for name, entry in look(plan).items()
            if entry.consumption > (before[name].consumption if name in before else 0)
        }
        if not kept:
            return []
        if time.monotonic() > end:
            text = f"still in use, {GIVE_BACK_S:g} s after the last connection was closed"
            return bounded([f"{_shown(name)}: {used} {text}" for name, used in sorted(kept.items())])
        time.sleep(PAUSE_S)


def _client(plan: Options) -> Client:
    return Client(plan.host, plan.port, path=plan.socket, tls=context_of(plan) or False, timeout=30.0)


def _name(plan: Options, number: int) -> bytes:
    """Returns the name that the load makes from a number."""
    digits = min(plan.name_size, 8)
    return b"n" * (plan.name_size - digits) + f"{number:08x}".encode()[8 - digits :]


def _is_ours(plan: Options, name: bytes) -> bool:
    first = name.partition(b":")[0]
    try:
        number = int(first[-8:].lstrip(b"n"), 16)
    except ValueError:
        return False
    return 0 <= number < plan.names and name in _counters(plan, _name(plan, number))


def _shown(name: bytes) -> str:
    return name.decode("ascii", "backslashreplace")


DIALECT = Dialect(
    name="counter",
    order=0,
    port=wire.PORT,
    ops=COUNTING,
    requests=requests_of,
    name_size_max=65535,
    inner={"cancel": Op("cancel", names="")},
    options=NAMED | TAKING,
    mistakes=mistakes_of,
    fills={"number": ("acquire", "release")},
    checks=checks_of,
    broken="a counter was above its maximum",
)
