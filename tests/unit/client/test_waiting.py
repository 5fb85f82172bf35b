"""The steps of a client that waits: what it does next, after each answer."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client._holding import RAISE, Wanted
from counterd.client._tenure import AWAY_S, SLICE_S, Seen, Tenure
from counterd.client._turns import Turns
from counterd.client._waiting import ASK, GIVE_UP, LOOK, WAIT, drive, drive_async, waiting
from counterd.errors import ConnectionLost, NotAvailable, Timeout

if TYPE_CHECKING:
    from counterd.client._waiting import Steps

NAME = b"n"
REFUSED = NotAvailable(0x21, "")
LOST = ConnectionLost("lost")


class Scene:
    """A client's turns, and a clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.retry_at: float | None = 0.0
        self.turns = Turns()

    def steps(self, timeout: float | None = None, tenure: Tenure | None = None) -> tuple[Steps, threading.Event]:
        turn, wanted = threading.Event(), Wanted(NAME, timeout, RAISE)
        made = waiting(self.turns, turn, wanted, tenure, now=lambda: self.now, retry_at=lambda: self.retry_at)
        return made, turn


def test_the_first_asks_at_once() -> None:
    scene = Scene()
    steps, _ = scene.steps()
    assert next(steps) == (ASK,)
    with pytest.raises(StopIteration) as done:
        steps.send("granted")
    assert done.value.value == "granted"


def test_others_wait_for_their_turn_and_who_does_not_wait_has_none() -> None:
    scene = Scene()
    first, _ = scene.steps()
    second, turn = scene.steps(timeout=5)
    assert (next(first), next(second)) == ((ASK,), (WAIT, 5))
    assert next(scene.steps(timeout=0)[0]) == (ASK,)
    first.close()
    assert turn.is_set(), "its turn has come"
    assert second.send(True) == (ASK,)
    second.close()
    assert next(scene.steps()[0]) == (ASK,), "nobody is left in the queue"


def test_after_a_refusal_it_waits_for_longer_each_time() -> None:
    steps, turn = Scene().steps()
    next(steps)
    pauses = []
    for _ in range(4):
        act, pause = steps.throw(REFUSED)
        assert act is WAIT
        pauses.append(pause)
        turn.set()
        assert steps.send(True) == (ASK,)
        assert not turn.is_set(), "what comes from here on counts"
    assert pauses[3] > pauses[0] > 0


def test_who_has_waited_long_enough_gives_up() -> None:
    scene = Scene()
    steps, _ = scene.steps(timeout=1)
    next(steps)
    act, pause = steps.throw(REFUSED)
    assert (act, pause <= 1) == (WAIT, True)
    scene.now += 1
    assert steps.send(False) == (ASK,), "once more, as time passed"
    act, queue = steps.throw(REFUSED)
    assert (act, queue.waiters != {}) == (GIVE_UP, True)
    with pytest.raises(NotAvailable):
        steps.send(REFUSED)


def test_who_never_has_its_turn_gives_up_too() -> None:
    scene = Scene()
    first, _ = scene.steps()
    next(first)
    steps, _ = scene.steps(timeout=1)
    assert next(steps) == (WAIT, 1)
    act, _ = steps.send(False)
    assert act is GIVE_UP
    with pytest.raises(NotAvailable):
        steps.send(REFUSED)


def test_a_lost_connection_is_waited_for() -> None:
    scene = Scene()
    scene.retry_at = 107.0
    steps, _ = scene.steps(timeout=10)
    next(steps)
    assert steps.throw(LOST) == (WAIT, 7)
    scene.now = 110.0
    assert steps.send(False) == (ASK,)
    with pytest.raises(ConnectionLost):
        steps.throw(LOST)


def test_but_not_by_who_is_closed_and_nothing_else_is() -> None:
    scene = Scene()
    scene.retry_at = None
    steps, _ = scene.steps()
    next(steps)
    with pytest.raises(ConnectionLost):
        steps.throw(LOST)
    steps, _ = scene.steps()
    next(steps)
    with pytest.raises(Timeout):
        steps.throw(Timeout("t"))
    assert next(scene.steps()[0]) == (ASK,), "they have left the queue"


def test_who_has_had_it_for_a_while_looks_and_lets_others_go_first() -> None:
    scene, tenure = Scene(), Tenure()
    tenure.granted("hold", scene.now)
    tenure.released("hold", scene.now)
    scene.now += 1.5 * SLICE_S
    steps, _ = scene.steps(tenure=tenure)
    assert next(steps) == (LOOK,)
    act, *_ = steps.send(Seen(1, 5))  # nothing was known before: so nobody waits
    assert act is ASK
    tenure.granted("hold", scene.now)
    tenure.released("hold", scene.now)
    scene.now += 1.5 * SLICE_S
    steps, _ = scene.steps(tenure=tenure)
    assert next(steps) == (LOOK,)
    act, pause = steps.send(Seen(1, 6))
    assert (act, 0 < pause <= AWAY_S) == (WAIT, True)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_driver_does_each_step(is_async: bool) -> None:
    scene = Scene()
    steps, turn = scene.steps(timeout=5)
    done: list[Any] = []
    answers = iter([REFUSED, "granted"])

    def ask() -> Any:
        done.append(ASK)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(seconds: float) -> bool:
        done.append(WAIT)
        return turn.is_set()

    async def ask_too() -> Any:
        return ask()

    async def wait_too(seconds: float) -> bool:
        return wait(seconds)

    if is_async:
        result = asyncio.run(drive_async(steps, {ASK: ask_too, WAIT: wait_too}))
    else:
        result = drive(steps, {ASK: ask, WAIT: wait})
    assert (result, done) == ("granted", [ASK, WAIT, ASK])
    assert scene.turns.join(NAME, threading.Event()).waiters, "it has left: this one is alone"
