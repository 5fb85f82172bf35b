"""Whether a sentinel room kept its promises: nothing was granted beyond a limit, and nothing stays in use.

A side, pure Python. The load processes count what is surely held (granted, and its release not sent). There is no Dump,
so the room is asked: of a flow of which so many are in use, all that is left is granted at once, and one more is not.
Needs flows whose limit is the plan's maximum, whom nobody else asks, and leases that are longer than anything is held.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from counterd.bench.asking import resolve
from counterd.bench.flows import FIRST_SEMAPHORE
from counterd.errors import ProtocolError
from counterd.protocols.sentinel.wire import Response, ResponseParser, Status, acquire, release

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from counterd.bench._board import Board
    from counterd.bench.plan import Plan

GIVE_BACK_S = 30.0
LOOK_S = 5.0  # that an earlier load's tokens may take to end
PAUSE_S = 0.02
SHOWN = 10
AT_ONCE = 500  # requests: less than anybody's socket holds
RECEIVE_SIZE = 65536


class Finding(NamedTuple):
    """What is wrong with a flow, and whether that may pass: tokens of earlier loads end."""

    text: str
    passes: bool


def look(plan: Plan) -> None:
    """ProtocolError: a flow is not there, has another limit, or is in use."""
    if found := _wait(plan, LOOK_S):
        first = min(found, key=lambda each: each.passes)
        raise ProtocolError(f"{first.text}: the count of each rule has to be --maximum, and nobody else may ask")


def while_held(plan: Plan, board: Board) -> list[str]:
    """Violations while nothing is under way and all connections are open."""
    return _bounded([each.text for each in probe(plan, board.all_held())])


def when_gone(plan: Plan) -> list[str]:
    """Violations once all connections are closed: whatever is not back after GIVE_BACK_S."""
    when = f"{GIVE_BACK_S:g} s after the last connection was closed"
    return _bounded([f"{each.text}, {when}" for each in _wait(plan, GIVE_BACK_S)])


def _wait(plan: Plan, seconds: float) -> list[Finding]:
    """What is found wrong where nothing is held, after that time at most."""
    end = time.monotonic() + seconds
    while (found := probe(plan, {})) and all(each.passes for each in found) and time.monotonic() < end:
        time.sleep(PAUSE_S)
    return found


def probe(plan: Plan, held: Mapping[int, int]) -> list[Finding]:
    """Of each flow: are so many in use, and no others? By its number, counted from 0. Changes nothing."""
    found: list[Finding] = []
    with resolve(plan).connect() as connection:
        for start in range(0, plan.names, AT_ONCE // 2):
            numbers = range(start, min(plan.names, start + AT_ONCE // 2))
            left = [max(0, plan.maximum - held.get(number, 0)) for number in numbers]
            asked = [
                acquire(number, FIRST_SEMAPHORE + number, max(1, count))
                for number, most in zip(numbers, left, strict=True)
                for count in (most + 1, most)
            ]
            answers = _asked(connection, asked)
            _asked(connection, [release(0, each.token_id) for each in answers if each.status == Status.OK])
            for number, most, more, rest in zip(numbers, left, answers[::2], answers[1::2], strict=True):
                found += _judged(FIRST_SEMAPHORE + number, plan.maximum, most, more.status, rest.status)
    return found


def _judged(flow: int, maximum: int, left: int, more: int, rest: int) -> Iterator[Finding]:
    """more, rest: the status of one too many, and of all that is left."""
    used = f"flow {flow}: {maximum - left} of {maximum} are held, and"
    if more == Status.OK:
        yield Finding(f"{used} {left + 1} more were granted", False)
    elif more != Status.BLOCKED:
        yield Finding(f"{used} the answer is status {more}", False)
    elif left and rest != Status.OK:
        yield Finding(f"{used} the other {left} are not to be had", True)


def _asked(connection: socket.socket, requests: list[bytes]) -> list[Response]:
    """The answers, in the order of the requests."""
    parser = ResponseParser()
    answers: list[Response] = []
    connection.sendall(b"".join(requests))
    while len(answers) < len(requests):
        data = connection.recv(RECEIVE_SIZE)
        if not data:
            raise ProtocolError("the server closed a connection that asked what is left")
        answers += parser.feed(data)
    return answers


def _bounded(found: list[str]) -> list[str]:
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]
