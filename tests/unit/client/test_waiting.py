"""The steps of a hold that waits for permits: its next step after each answer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest

from counterd.client._backoff import ASK_LONGEST_S
from counterd.client._holding import RAISE, Wanted
from counterd.client._steps import PAUSE, WAIT
from counterd.client._wait_queues import WaitQueues
from counterd.client._waiting import Patience, holding, queued, waiting
from counterd.errors import ConnectionLost, NotAvailable, OutOfMemory, Timeout, UnknownCommand

if TYPE_CHECKING:
    from counterd.client._steps import Steps

NAME = b"n"
REFUSED = NotAvailable(0x21, "")
DRAINING = NotAvailable(0x21, "Draining")
LOST = ConnectionLost("lost")
UNKNOWN = UnknownCommand(0x81, "")
FULL = OutOfMemory(0x82, "")
ASK, QUEUE, GIVE_UP = "ask", "queue", "give up"  # acts of a hold of this test


class Ways:
    """A hold whose steps are acts with the names of its methods, and the same arguments."""

    def ask(self) -> Any:
        return (yield (ASK,))

    def queue(self, seconds: float | None, sent: Any = None) -> Any:
        return (yield QUEUE, seconds, sent)

    def give_up(self, queue: Any, waiter: Any) -> Any:
        return (yield GIVE_UP, queue)


class Scene:
    """A client's turns, and a clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.retry_at: float | None = 0.0
        self.queues = WaitQueues()

    def steps(self, timeout: float | None = None) -> tuple[Steps[Any], threading.Event]:
        waiter, wanted = threading.Event(), Wanted(NAME, timeout, RAISE)
        patience = Patience(timeout, lambda: self.now)
        return waiting(self.queues, waiter, wanted, patience, Ways(), retry_at=lambda: self.retry_at), waiter

    def hold(self, timeout: float | None = None) -> tuple[Steps[Any], threading.Event]:
        waiter, wanted, patience = threading.Event(), Wanted(NAME, timeout, RAISE), Patience(timeout, lambda: self.now)
        return holding(self.queues, waiter, wanted, patience, Ways(), retry_at=lambda: self.retry_at), waiter


def test_the_first_waiter_asks_at_once() -> None:
    scene = Scene()
    steps, _ = scene.steps()
    assert next(steps) == (ASK,)
    with pytest.raises(StopIteration) as done:
        steps.send("granted")
    assert done.value.value == "granted"


def test_later_waiters_wait_for_their_turn_except_with_timeout_0() -> None:
    scene = Scene()
    first, _ = scene.steps()
    second, waiter = scene.steps(timeout=5)
    assert (next(first), next(second)) == ((ASK,), (WAIT, ANY, 5))
    assert next(scene.steps(timeout=0)[0]) == (ASK,)
    first.close()
    assert waiter.is_set(), "its turn has come"
    assert second.send(True) == (ASK,)
    second.close()
    assert next(scene.steps()[0]) == (ASK,), "nobody is left in the queue"


def test_the_pause_grows_with_each_refusal() -> None:
    steps, waiter = Scene().steps()
    next(steps)
    pauses = []
    for _ in range(4):
        act, _, pause = steps.throw(REFUSED)
        assert act is WAIT
        pauses.append(pause)
        waiter.set()
        assert steps.send(True) == (ASK,)
        assert not waiter.is_set(), "what comes from here on counts"
    assert pauses[3] > pauses[0] > 0


def test_the_pause_grows_while_the_queue_of_the_server_refuses() -> None:
    """As in a drain. The hold leaves the client's queue each time it has asked."""
    steps, _ = Scene().hold()
    assert next(steps)[0] == QUEUE
    act, *rest = steps.throw(REFUSED)
    pauses = []
    for _ in range(12):
        assert act == QUEUE
        if rest[1] is not None:
            rest[1]()
        act, _, pause = steps.throw(REFUSED)
        assert act is WAIT
        pauses.append(pause)
        act, *rest = steps.send(False)
    assert pauses[-1] >= ASK_LONGEST_S / 2 > pauses[0] > 0


def test_a_waiter_times_out() -> None:
    scene = Scene()
    steps, _ = scene.steps(timeout=1)
    next(steps)
    act, _, pause = steps.throw(REFUSED)
    assert (act, pause <= 1) == (WAIT, True)
    scene.now += 1
    assert steps.send(False) == (ASK,), "once more, as time passed"
    act, queue = steps.throw(REFUSED)
    assert (act, queue.waiters != {}) == (GIVE_UP, True)
    with pytest.raises(NotAvailable):
        steps.send(REFUSED)


def test_a_waiter_without_a_turn_times_out() -> None:
    scene = Scene()
    first, _ = scene.steps()
    next(first)
    steps, _ = scene.steps(timeout=1)
    assert next(steps) == (WAIT, ANY, 1)
    act, _ = steps.send(False)
    assert act == GIVE_UP
    with pytest.raises(NotAvailable):
        steps.send(REFUSED)


def test_a_waiter_waits_for_another_connection() -> None:
    scene = Scene()
    scene.retry_at = 107.0
    steps, _ = scene.steps(timeout=10)
    next(steps)
    assert steps.throw(LOST) == (WAIT, ANY, 7)
    scene.now = 110.0
    assert steps.send(False) == (ASK,)
    with pytest.raises(ConnectionLost):
        steps.throw(LOST)


def test_a_waiter_of_a_closed_client_and_one_with_another_error_raise() -> None:
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


# ---- in the queue of the server -------------------------------------------------------------------------------------


def refused(consumption: int) -> NotAvailable:
    error = NotAvailable(0x21, "")
    error.consumption = consumption
    return error


def test_holds_wait_in_the_server_at_the_same_time() -> None:
    scene = Scene()
    holds = [scene.hold(timeout)[0] for timeout in (None, 5, None)]
    assert [next(steps) for steps in holds] == [(QUEUE, None, None), (QUEUE, 5, None), (QUEUE, None, None)]
    assert not scene.queues.has(NAME), "there is no queue here"
    with pytest.raises(StopIteration) as done:
        holds[1].send("granted")
    assert done.value.value == "granted"


def test_a_hold_with_timeout_0_asks_once() -> None:
    steps, _ = Scene().hold(timeout=0)
    assert next(steps) == (QUEUE, 0, None)
    with pytest.raises(NotAvailable, match=r"3 in use, waited 0 s"):
        steps.throw(refused(3))


def test_a_hold_with_timeout_0_asks_a_server_without_takes_once_more() -> None:
    steps, _ = Scene().hold(timeout=0)
    assert next(steps) == (QUEUE, 0, None)
    assert steps.throw(UNKNOWN) == (ASK,)
    act, _ = steps.throw(REFUSED)
    assert act == GIVE_UP


@pytest.mark.parametrize("later", [False, True])
def test_a_hold_of_more_than_the_limit_of_the_server_does_not_wait(later: bool) -> None:
    """later: the limit was set while it waited for its turn, as after a loss."""
    scene = Scene()
    steps, _ = scene.hold()
    next(steps)
    if later:
        assert steps.throw(LOST)[0] == QUEUE
    error = refused(0)
    error.limit = 3
    with pytest.raises(NotAvailable) as caught:
        steps.throw(error)
    assert caught.value is error
    assert not scene.queues.has(NAME)


def test_a_wait_in_the_server_times_out() -> None:
    scene = Scene()
    steps, _ = scene.hold(timeout=5)
    next(steps)
    scene.now += 5
    with pytest.raises(NotAvailable, match=r"3 in use, waited 5 s") as caught:
        steps.throw(refused(3))
    assert caught.value.consumption == 3


def test_a_server_without_a_queue_is_asked_by_one_hold_at_a_time() -> None:
    scene = Scene()
    first, _ = scene.hold()
    second, waiter = scene.hold(timeout=5)
    next(first)
    next(second)
    act, _, leave = first.throw(UNKNOWN)
    assert (act, callable(leave)) == (QUEUE, True), "the next connection may be to a server that has one"
    assert second.throw(UNKNOWN) == (WAIT, ANY, 5)
    assert first.throw(UNKNOWN) == (ASK,)
    assert first.throw(REFUSED)[0] is WAIT
    assert not waiter.is_set()
    assert first.send(False)[0] == QUEUE
    assert first.throw(UNKNOWN) == (ASK,)
    first.close()
    assert waiter.is_set()
    assert second.send(True)[0] == QUEUE
    second.close()
    assert not scene.queues.has(NAME)


def test_later_holds_wait_behind_those_in_the_clients_queue() -> None:
    scene = Scene()
    first, _ = scene.hold()
    next(first)
    first.throw(UNKNOWN)
    assert next(scene.hold()[0]) == (WAIT, ANY, None)
    assert next(scene.hold(timeout=0)[0]) == (QUEUE, 0, None)


def test_after_a_loss_each_hold_asks_when_the_one_before_it_has_asked() -> None:
    scene = Scene()
    holds = [scene.hold() for _ in range(3)]
    for steps, _ in holds:
        next(steps)
    (first, _), (second, waiter), (third, last) = holds
    act, _, sent = first.throw(LOST)
    assert act == QUEUE
    assert (second.throw(LOST), third.throw(LOST)) == ((WAIT, ANY, None), (WAIT, ANY, None))
    scene.retry_at = scene.now + 7
    assert first.throw(LOST) == (WAIT, ANY, 7)
    act, _, sent = first.send(False)
    sent()
    assert (waiter.is_set(), last.is_set()) == (True, False)
    act, _, sent = second.send(True)
    assert act == QUEUE
    sent()
    assert last.is_set()
    assert third.send(True)[0] == QUEUE
    third.close()
    assert not scene.queues.has(NAME), "all have left"
    with pytest.raises(StopIteration):
        first.send("granted")


def test_a_refused_hold_waits_behind_the_others() -> None:
    scene = Scene()
    (first, _), (second, _) = scene.hold(), scene.hold()
    next(first)
    next(second)
    _, _, sent = first.throw(LOST)
    second.throw(LOST)
    sent()
    second.send(True)
    assert first.throw(UNKNOWN) == (WAIT, ANY, None)
    assert second.throw(UNKNOWN) == (ASK,)


def test_one_hold_at_a_time_asks_while_the_queue_of_the_server_is_full() -> None:
    scene = Scene()
    (first, _), (second, waiter) = scene.hold(), scene.hold()
    next(first)
    next(second)
    assert first.throw(FULL) == (QUEUE, None, None), "it stays in its place"
    assert second.throw(FULL) == (WAIT, ANY, None)
    assert first.throw(FULL) == (ASK,), "of what there is none, the reply to an acquire says"
    act, *_ = first.throw(REFUSED)
    assert act is WAIT
    assert first.send(False) == (QUEUE, None, None)
    with pytest.raises(StopIteration):
        first.send("granted")
    assert waiter.is_set()
    assert second.send(True) == (QUEUE, None, None)
    second.throw(FULL)
    with pytest.raises(OutOfMemory):
        second.throw(FULL)
    assert not scene.queues.has(NAME)


def test_a_draining_server_is_asked_again() -> None:
    """With pauses, for the server that follows it; a timeout ends that."""
    scene = Scene()
    steps, _ = scene.hold(timeout=5)
    next(steps)
    scene.now += 1
    act, left, _ = steps.throw(refused(3))
    assert (act, left) == (QUEUE, 4)
    act, _, pause = steps.throw(refused(3))
    assert (act, 0 < pause < 0.25) == (WAIT, True)
    scene.now += 4
    assert steps.send(False)[:2] == (QUEUE, 0)
    with pytest.raises(NotAvailable, match="waited 5 s"):
        steps.throw(refused(3))


@pytest.mark.parametrize("late", [False, True])
def test_a_closed_client_does_not_wait_for_another_connection(late: bool) -> None:
    scene = Scene()
    steps, _ = scene.hold()
    next(steps)
    if late:
        steps.throw(LOST)
    scene.retry_at = None
    with pytest.raises(ConnectionLost):
        steps.throw(LOST)
    assert not scene.queues.has(NAME)


def test_a_call_that_waits_only_in_the_server_survives_a_loss() -> None:
    scene = Scene()
    steps = queued(Patience(10, lambda: scene.now), Ways().queue, retry_at=lambda: scene.retry_at)
    assert next(steps) == (QUEUE, 10, None)
    scene.now, scene.retry_at = 103.0, 105.0
    assert steps.throw(LOST) == (PAUSE, 2)
    assert steps.send(None) == (QUEUE, 7, None)
    scene.now = 110.0
    with pytest.raises(ConnectionLost):
        steps.throw(LOST)


def test_a_call_that_waits_only_in_the_server_survives_a_drain() -> None:
    """A refusal ends the wait, unless the server drains."""
    scene = Scene()
    steps = queued(Patience(10, lambda: scene.now), Ways().queue, retry_at=lambda: scene.retry_at)
    next(steps)
    act, *_ = steps.throw(DRAINING)
    assert act is PAUSE
    assert steps.send(None) == (QUEUE, 10, None)
    with pytest.raises(NotAvailable):
        steps.throw(REFUSED)
    steps = queued(Patience(0, lambda: scene.now), Ways().queue, retry_at=lambda: scene.retry_at)
    next(steps)
    with pytest.raises(NotAvailable, match="Draining"):
        steps.throw(DRAINING)


def test_the_error_of_a_timeout_during_a_drain_says_so() -> None:
    """The cause is not what is in use."""
    scene = Scene()
    steps, _ = scene.hold(timeout=1)
    next(steps)
    act, *_ = steps.throw(DRAINING)
    assert act == QUEUE
    act, *_ = steps.throw(DRAINING)
    assert act is WAIT
    scene.now += 1
    act, *_ = steps.send(False)
    assert act == QUEUE
    with pytest.raises(NotAvailable, match="Draining"):
        steps.throw(DRAINING)
