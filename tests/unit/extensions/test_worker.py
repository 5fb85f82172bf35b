"""Jobs in threads: order, outcomes, and extensions that block, compute, raise or get too many calls.

No test waits for a time limit: a thread is stuck until the test releases it, and inspect() gets the time as an
argument."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from counterd.contract import Busy
from counterd.extensions import worker as module
from counterd.extensions.worker import STUCK_MAX, Worker
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 100.0  # seconds; no test waits so long
LATER = int((LIMIT + 1) * 1e9)


class Bench:
    """A worker on a loop. told: outcomes by call. lines: reports by cause. let_go: lets the stuck call end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.told: list[tuple[str, Any]] = []
        self.lines: list[tuple[str, str]] = []
        self.wakes = 0
        self.let_go = threading.Event()
        self.worker = Worker("gate: keeper x:y", LIMIT, lambda cause, text, *_, **__: self.lines.append((cause, text)))

        def wake() -> None:
            self.wakes += 1

        self.worker.start(self.loop, wake)

    def ask(self, call: str, job: Callable[[], Any] | None = None) -> None:
        self.worker.ask(call, job or (lambda: call), lambda outcome, _now_ns: self.told.append((call, outcome)))

    def stick(self, call: str, job: Callable[[], Any] | None = None) -> None:
        """Makes a call that does not end until let_go, and waits until the worker executes it."""
        begun = threading.Event()

        def stuck() -> str:
            begun.set()
            (job or self.let_go.wait)()
            return call

        self.ask(call, stuck)
        assert begun.wait(PATIENCE)

    def run(self, until: Callable[[], object]) -> None:
        """Runs the loop until a condition is true."""

        async def wait() -> None:
            end = time.monotonic() + PATIENCE
            while not until():
                assert time.monotonic() < end, (self.told, self.lines)
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(wait())

    def until_told(self, count: int) -> None:
        self.run(lambda: len(self.told) >= count)

    def inspect_later(self) -> None:
        self.worker.inspect(time.monotonic_ns() + LATER)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.let_go.set()
    bench.worker.stop()
    bench.loop.close()


def test_jobs_run_in_order_in_one_thread_and_end_on_the_loop(bench: Bench) -> None:
    threads = set()

    def job() -> int:
        threads.add(threading.current_thread().name)
        return len(threads)

    tellers = set()
    for _ in range(50):
        bench.worker.ask("a", job, lambda outcome, now_ns: tellers.add((threading.get_ident(), outcome, now_ns > 0)))
        bench.ask("a")
    bench.until_told(50)
    assert bench.told == [("a", "a")] * 50
    assert threads == {"gate: keeper x:y"}
    assert tellers == {(threading.get_ident(), 1, True)}
    assert 1 <= bench.wakes <= 100
    assert bench.lines == []


def test_outcomes_are_delivered_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_NS", 1)
    for _ in range(20):
        bench.ask("a")
    bench.until_told(20)
    bench.run(lambda: bench.wakes >= 20)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_an_exception_is_logged_and_the_next_job_runs(bench: Bench, error: BaseException, text: str) -> None:
    def fails() -> None:
        raise error

    bench.ask("a", fails)
    bench.ask("b")
    bench.until_told(2)
    (_, outcome), second = bench.told
    assert isinstance(outcome, Exception)
    assert second == ("b", "b")
    assert bench.lines == [("failed", f"gate: keeper x:y: a failed: {text}")]


def test_the_text_of_an_exception_is_made_in_its_thread(bench: Bench) -> None:
    """Converting an exception to text runs code of the extension, which may take long, or raise."""
    asked: list[int] = []

    class Mute(BaseException):
        def __str__(self) -> str:
            asked.append(threading.get_ident())
            raise self

    def fails() -> None:
        raise Mute

    bench.ask("a", fails)
    bench.ask("b")
    bench.until_told(2)
    assert isinstance(bench.told[0][1], Exception)
    assert bench.told[1] == ("b", "b")
    assert asked
    assert threading.get_ident() not in asked
    assert bench.lines == [("failed", "gate: keeper x:y: a failed: an error whose message cannot be shown")]


def test_an_exception_in_a_callback_does_not_block_later_outcomes(bench: Bench) -> None:
    caught: list[Any] = []
    bench.loop.set_exception_handler(lambda _, context: caught.append(context["exception"]))

    def raises(_outcome: object, _now_ns: int) -> None:
        raise AssertionError("ours")

    bench.worker.ask("a", int, raises)
    for _ in range(3):
        bench.ask("b")
    bench.until_told(3)
    assert [str(error) for error in caught] == ["ours"]


def test_a_stuck_thread_is_replaced(bench: Bench) -> None:
    bench.stick("blocked")
    bench.ask("next")
    bench.worker.inspect(time.monotonic_ns())
    assert bench.lines == []
    bench.inspect_later()
    bench.until_told(1)
    assert bench.told == [("next", "next")]
    assert bench.lines == [("stuck", "gate: keeper x:y: blocked takes longer than 100000 ms; stuck threads: 1")]
    bench.let_go.set()
    bench.until_told(2)
    assert bench.told[1] == ("blocked", "blocked"), "whoever is told knows that it is too late"
    bench.ask("again")
    bench.until_told(3)
    bench.inspect_later()
    assert len(bench.lines) == 1


def test_a_thread_is_not_stuck_in_a_job_whose_outcome_was_delivered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the loop's thread ran at once, while the other is still behind the telling.
    monkeypatch.setattr(bench.loop, "call_soon_threadsafe", lambda call: call())
    told = threading.Event()

    def then(_outcome: object, _now_ns: int) -> None:
        bench.inspect_later()
        told.set()

    bench.worker.ask("a", int, then)
    assert told.wait(PATIENCE)
    assert bench.lines == []


def test_when_too_many_threads_are_stuck_calls_are_refused(bench: Bench) -> None:
    for number in range(STUCK_MAX):
        bench.stick(f"blocked {number % 2}")
        bench.inspect_later()
    assert threading.active_count() >= STUCK_MAX
    assert bench.lines[-1][1].endswith("stuck threads: 4; the extension gets no further calls until one returns")
    bench.ask("refused")
    assert bench.told == [], "whoever asks is not called back at once"
    bench.until_told(1)
    assert isinstance(bench.told[0][1], Busy)
    text = "gate: keeper x:y: refused was refused: all threads of the extension are stuck in blocked 0, blocked 1"
    assert bench.lines[STUCK_MAX:] == [("busy", text)]
    bench.let_go.set()
    bench.until_told(1 + STUCK_MAX)
    bench.ask("served")
    bench.until_told(2 + STUCK_MAX)
    assert bench.told[-1] == ("served", "served")


def test_a_computing_thread_is_not_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Thread, "burnt_in_job", lambda _: LIMIT)
    bench.stick("computes")
    bench.inspect_later()
    bench.ask("refused")
    bench.until_told(1)
    assert isinstance(bench.told[0][1], Busy)
    bench.let_go.set()
    bench.until_told(2)
    bench.ask("served")
    bench.until_told(3)
    assert bench.told[-1] == ("served", "served")


def test_too_many_jobs_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    bench.stick("blocked")
    for call in "abc":
        bench.ask(call)
    bench.until_told(1)
    assert bench.told[0][0] == "c"
    assert isinstance(bench.told[0][1], Busy)
    assert bench.lines == [("busy", "gate: keeper x:y: c was refused: 2 calls are waiting already")]
    bench.let_go.set()
    bench.until_told(4)
    assert [call for call, _ in bench.told] == ["c", "blocked", "a", "b"]


def test_a_job_that_waited_too_long_is_not_begun(bench: Bench) -> None:
    bench.stick("blocked")
    bench.worker.limit = -1.0
    bench.ask("late")
    bench.ask("late")
    bench.worker.limit = LIMIT
    bench.ask("in time")
    bench.let_go.set()
    bench.until_told(2)
    assert [call for call, _ in bench.told] == ["blocked", "in time"]
    bench.worker.inspect(time.monotonic_ns())
    bench.worker.inspect(time.monotonic_ns())
    text = "gate: keeper x:y: overloaded: 2 calls did not start within 100000 ms"
    assert bench.lines == [("late", text)]


def test_a_call_that_uses_much_cpu_is_named(bench: Bench) -> None:
    def burn() -> None:
        while not bench.let_go.is_set():
            pass

    bench.stick("idle")
    bench.worker.burns(0.001)
    bench.worker.burns(10.0)
    assert bench.lines == []
    bench.inspect_later()
    bench.stick("counts", burn)

    def named() -> bool:
        bench.worker.burns(1e-9)  # any of it, as a busy machine gives the thread little between two looks
        return len(bench.lines) > 1

    bench.run(named)
    bench.let_go.set()
    cause, text = bench.lines[1]
    assert cause == "cpu"
    assert text.startswith("gate: keeper x:y uses much CPU in counts: 0.")
    assert text.endswith(" s in the last 0.0 s")


def test_an_ended_thread_uses_no_cpu(bench: Bench) -> None:
    found: list[threading.Thread] = []

    def stuck() -> None:
        found.append(threading.current_thread())
        bench.let_go.wait()

    bench.stick("blocked", stuck)
    bench.inspect_later()
    (thread,) = bench.worker._stuck
    bench.let_go.set()
    found[0].join(PATIENCE)
    bench.run(lambda: thread.burnt() == 0)  # to the system it may live a moment longer


def test_after_the_end_no_outcome_is_delivered(bench: Bench) -> None:
    bench.stick("blocked")
    bench.ask("a")
    bench.worker.stop()
    bench.let_go.set()
    bench.ask("b")
    bench.loop.run_until_complete(asyncio.sleep(0.02))
    assert bench.told == []
    bench.loop.close()


def test_the_loop_may_end_before_the_threads(bench: Bench) -> None:
    bench.stick("blocked")
    bench.loop.close()
    bench.let_go.set()
    deadline = time.monotonic() + PATIENCE
    while not bench.worker._closed:
        assert time.monotonic() < deadline
