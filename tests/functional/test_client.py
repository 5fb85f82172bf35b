"""The blocking client against real servers: holds, waiting, shared connections, and interrupts.

Lost connections and processes are in test_client_lost.py and test_client_processes.py."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client
from counterd.errors import ConnectionLost, InvalidArguments, NotAcquired, NotAvailable, NotFound, ServerError
from counterd.protocols.counter import wire
from kit import servers
from kit.connections import cut, hears_of_loss, is_asleep
from kit.daemon import PATIENCE, wait_until
from kit.interrupting import Points
from kit.scripted.counter import Server as WithoutTakes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.scripted.counter import Request

THREADS = 16
PAUSE_S = 0.0625  # the shortest pause between two requests of one that has waited for long
POINTS_MAX = 1000


@pytest.fixture(scope="module", params=["counterd", pytest.param("yrmcdsd", marks=pytest.mark.needs("yrmcdsd"))])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.running(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A counterd for tests of what happens within the client, for which yrmcdsd is not needed."""
    with servers.running("counterd", tmp_path_factory.mktemp("counterd")) as running:
        yield running


@contextlib.contextmanager
def threads(*functions: Callable[[], object]) -> Iterator[list[threading.Thread]]:
    """Runs these functions in threads during the block, and raises their errors."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    started = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in started:
        thread.start()
    yield started
    for thread in started:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_until_asleep(thread: threading.Thread) -> None:
    """Waits until a thread waits for its turn in its client. A hold's request to a server has a deadline instead."""
    wait_until(lambda: thread.native_id and is_asleep(thread.native_id), "it waits for its turn")


def test_every_command_of_the_protocol(server: servers.Server) -> None:
    with server.client() as client, server.client() as other:
        client.noop()
        with pytest.raises(NotFound, match=r"^Not found"):
            client.get("jobs")
        assert client.acquire("jobs", 3, maximum=4) == 3
        assert other.get(b"jobs") == 3
        with pytest.raises(NotAvailable, match=r"^Resource not available"):
            other.acquire("jobs", 2, maximum=4)
        with pytest.raises(InvalidArguments, match=r"^Invalid arguments"):
            other.acquire("jobs", 0, maximum=4)
        with pytest.raises(NotAcquired, match=r"^Not acquired"):
            other.release("jobs")
        client.release("jobs", 2)
        assert other.acquire("jobs", maximum=4) == 1
        assert (b"jobs", 2, 3) in [entry[:3] for entry in other.dump()]
        assert int(other.stats()["command:release"]) >= 2
    server.wait_for_use("jobs", 0)


def test_long_names(server: servers.Server) -> None:
    with server.client() as client:
        name = b"\0" * wire.NAME_MAX
        assert client.acquire(name, maximum=1) == 1
        assert (name, 1, 1) in [entry[:3] for entry in client.dump()]


# ---- holding --------------------------------------------------------------------------------------------------------


def test_a_hold_has_its_permits_while_the_block_runs(server: servers.Server) -> None:
    with server.client() as client:
        with client.hold("block", 2, maximum=3) as hold:
            assert server.used("block") == 2
            assert not hold.lost
            hold.raise_if_lost()
        assert server.used("block") == 0
        with hold:  # once more
            assert server.used("block") == 2
        assert server.used("block") == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_hold_gives_back_after_any_exception(server: servers.Server, error: type[BaseException]) -> None:
    with server.client() as client:
        with pytest.raises(error), client.hold("raising", 2, maximum=3):
            raise error
        wait_until(lambda: server.used("raising") == 0, "it is back")


def test_a_hold_gives_back_however_the_block_is_left(server: servers.Server) -> None:
    with server.client() as client:

        def returns() -> int:
            with client.hold("left", maximum=1):
                return server.used("left")

        def generates() -> Iterator[int]:
            with client.hold("left", maximum=1):
                yield server.used("left")

        assert returns() == 1
        assert server.used("left") == 0
        for _ in range(2):
            with client.hold("left", maximum=1):
                break
        assert server.used("left") == 0
        generator = generates()
        assert next(generator) == 1
        generator.close()  # which waits for no answer
        wait_until(lambda: server.used("left") == 0, "it is back")


def test_a_hold_in_a_garbage_collected_generator_gives_back(counterd: servers.Server) -> None:
    """The collector may run anywhere, also while this thread sends a request."""

    class Loop:
        generator: Iterator[None]
        itself: Loop

    with counterd.client() as client:

        def generates() -> Iterator[None]:
            with client.hold("collected", maximum=1, timeout=PATIENCE):
                yield

        for at in range(1, POINTS_MAX):
            loop = Loop()
            loop.generator, loop.itself = generates(), loop
            next(loop.generator)
            gc.disable()
            del loop
            with Points(at, gc.collect) as points:
                client.noop()
            gc.enable()
            if not points.fired:
                break
            counterd.wait_for_use("collected", 0)
    assert at > 1


@pytest.mark.parametrize("connects", [False, True])
def test_a_signal_handler_can_use_the_client_it_interrupted(counterd: servers.Server, connects: bool) -> None:
    """Wherever it comes, it has its answer or an error at once: else it would wait for ever for the code that it
    interrupted."""

    def handle() -> None:
        try:
            client.noop()
            answers.add("done")
        except RuntimeError as error:
            answers.add(str(error))

    answers: set[str] = set()
    with counterd.client() as client:
        for at in range(1, POINTS_MAX):
            client.noop()
            if connects:
                cut(client)
            with Points(at, handle) as points:
                client.noop()
            if not points.fired:
                break
    assert at > 1
    assert answers <= {"done", "a signal handler cannot use the client that it interrupted"}


def test_a_hold_decorates_functions(server: servers.Server) -> None:
    with server.client() as client:
        hold = client.hold("decorated", maximum=2)

        @hold
        def function(value: int, *, deeper: bool = False) -> int:
            """What it does."""
            assert not deeper or function(0) == 2
            return value + server.used("decorated")

        @hold
        def generator(count: int) -> Any:
            for _ in range(count):
                yield server.used("decorated")
            return "the end"

        assert (function.__name__, function.__doc__) == ("function", "What it does.")
        assert function(10, deeper=True) == 11
        assert server.used("decorated") == 0
        assert list(generator(2)) == [1, 1]
        generated = generator(1)
        assert (next(generated), server.used("decorated")) == (1, 1)
        with pytest.raises(StopIteration) as caught:
            next(generated)
        assert (caught.value.value, server.used("decorated")) == ("the end", 0)
        with pytest.raises(ZeroDivisionError):
            hold(lambda: 1 // 0)()
        assert server.used("decorated") == 0


def test_a_hold_does_not_decorate_asynchronous_functions(counterd: servers.Server) -> None:
    async def function() -> None: ...

    async def generator() -> Any:
        yield

    with counterd.client() as client:
        for asynchronous in (function, generator):
            with pytest.raises(TypeError, match=r"is asynchronous: it needs a hold of .*aio"):
                client.hold("a", maximum=1)(asynchronous)


def test_a_hold_is_entered_once_at_a_time(server: servers.Server) -> None:
    with server.client() as client:
        hold = client.hold("twice", maximum=5)
        with hold:
            with pytest.raises(RuntimeError, match="already in use"), hold:
                pytest.fail("entered again")
            assert server.used("twice") == 1
        assert server.used("twice") == 0


def test_nested_holds_of_one_name(server: servers.Server) -> None:
    with server.client() as client, client.hold("nested", 2, maximum=5):
        with client.hold("nested", 3, maximum=5):
            assert server.used("nested") == 5
        assert server.used("nested") == 2


def test_a_refusal_says_how_many_are_in_use(server: servers.Server) -> None:
    with server.client() as client, client.hold("full", 3, maximum=4):
        for timeout in (0, 0.05):
            with pytest.raises(NotAvailable) as caught, client.hold("full", 2, maximum=4, timeout=timeout):
                pytest.fail("granted")
            error = caught.value
            assert (error.status, error.name, error.resources, error.maximum) == (0x21, b"full", 2, 4)
            assert (error.consumption, error.waited) == (3, timeout)
            assert f"asked for 2 of full, maximum 4, 3 in use, waited {timeout} s" in str(error)
        assert server.used("full") == 3


def test_invalid_requests_raise_without_waiting(server: servers.Server) -> None:
    with server.client() as client:
        for resources in (0, 5):
            with pytest.raises(InvalidArguments), client.hold("wrong", resources, maximum=4):
                pytest.fail("granted")
        with pytest.raises(ValueError, match=r"^timeout must be"):
            client.hold("wrong", maximum=1, timeout=-1)
        with server.client(watch=True) as watching, pytest.raises(ValueError, match=r"^on_lost must be"):
            watching.hold("wrong", maximum=1, on_lost="what")
        with pytest.raises(ValueError, match=r"watch=True"):
            client.hold("wrong", maximum=1, on_lost="reacquire")
        with client.hold("wrong", maximum=1):
            pass


def test_a_hold_whose_permits_were_released_raises_not_acquired(server: servers.Server) -> None:
    """The program released them itself, which the hold notices at its end."""
    with server.client() as client:
        with pytest.raises(NotAcquired), client.hold("gone", 2, maximum=2):
            client.release("gone")
        with pytest.raises(ZeroDivisionError), client.hold("gone", maximum=2):
            client.release("gone", 1 // (client.release("gone") is not None))


def test_concurrent_holds_with_timeout_0_succeed_while_there_is_room(counterd: servers.Server) -> None:
    """They do not wait for each other's answers."""
    with counterd.client() as client:
        together = threading.Barrier(THREADS)

        def tries() -> None:
            for _ in range(20):
                together.wait(PATIENCE)
                with client.hold("room", maximum=THREADS, timeout=0):
                    pass

        with threads(*[tries] * THREADS):
            pass


# ---- waiting in line ------------------------------------------------------------------------------------------------


def test_a_hold_waits_until_another_program_gives_back(server: servers.Server) -> None:
    with server.client() as client, server.client() as other:
        other.acquire("awaited", maximum=1)

        def wait() -> None:
            with client.hold("awaited", maximum=1, timeout=PATIENCE):
                assert server.used("awaited") == 1

        with server.expecting_waiter(), threads(wait):
            server.wait_for_waiter()
            other.release("awaited")


def test_waiters_are_served_in_order_and_only_the_first_asks() -> None:
    """With a server without a queue."""
    order: list[int] = []
    with WithoutTakes() as server, Client(*server.address, timeout=PATIENCE) as client:
        held = client.hold("line", maximum=1)

        def wait(number: int) -> None:
            with client.hold("line", maximum=1):
                order.append(number)

        def until_asked_again(times: int) -> int:
            before = len(server.asked())
            wait_until(lambda: len(server.asked()) >= before + times, "the first asks again")
            return len(server.asked()) - before

        with contextlib.ExitStack() as waiters, held:
            waiters.enter_context(threads(lambda: wait(0)))
            until_asked_again(3)
            for number in range(1, THREADS):
                (thread,) = waiters.enter_context(threads(lambda number=number: wait(number)))
                wait_until_asleep(thread)
            start = time.monotonic()
            asked = until_asked_again(3)
            # One that asks: at 5 ms, then twice as late each time, to 125 ms, each shortened by half at most.
            assert asked <= 8 + (time.monotonic() - start) / PAUSE_S
            assert not held.lost
        assert order == list(range(THREADS))
        assert server.used[b"line"] == 0
        assert server.counters.most[b"line"] == 1


class Impatient(WithoutTakes):
    """A server that lets a test release right after a refusal. woken_s: how long after a release it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.released = 0.0
        self.refusals = 0
        self.woken_s: list[float] = []

    def answer(self, request: Request) -> bytes:
        answer = super().answer(request)
        if request.opcode == wire.Opcode.RELEASE:
            self.released = time.monotonic()
        elif request.opcode == wire.Opcode.ACQUIRE and answer[2]:
            self.refusals += 1
        elif request.opcode == wire.Opcode.ACQUIRE and self.refusals:
            self.woken_s.append(time.monotonic() - self.released)
        return answer


@pytest.mark.parametrize("release", ["release", "hold", "pipeline"])
def test_a_release_of_the_same_client_wakes_the_first_waiter_at_once(release: str) -> None:
    """The release is the cause: by then the pauses are so long that it would not ask so soon. A busy machine can be
    slower now and then, but not each time."""
    with Impatient() as server, Client(*server.address, timeout=PATIENCE) as client:

        def wait() -> None:
            with client.hold("woken", maximum=1):
                pass

        def wakes() -> bool:
            server.refusals = 0
            with contextlib.ExitStack() as stack:
                if release == "hold":
                    stack.enter_context(client.hold("woken", maximum=1))
                else:
                    client.acquire("woken", maximum=1)
                with threads(wait):
                    wait_until(lambda: server.refusals >= 8, "its pauses are long")
                    if release == "hold":
                        stack.close()
                    elif release == "pipeline":
                        assert client.pipeline().noop().release("woken").execute() == [None, None]
                    else:
                        client.release("woken")
            return server.woken_s[-1] < PAUSE_S

        wait_until(wakes, "it is woken")


def test_a_big_request_at_the_head_is_not_overtaken(server: servers.Server) -> None:
    order: list[str] = []
    with server.client() as client, contextlib.ExitStack() as stack:
        stack.enter_context(client.hold("big", 2, maximum=3))

        def wait(name: str, resources: int) -> None:
            with client.hold("big", resources, maximum=3):
                order.append(name)

        with server.expecting_waiter(), threads(lambda: wait("big", 3)):
            server.wait_for_waiter()
            with threads(lambda: wait("small", 1)) as (small,):
                server.wait_for_waiter(small)
                time.sleep(0.05)
                assert order == []
                stack.close()
    assert order == ["big", "small"]


def test_waiters_that_time_out_leave_the_queue(server: servers.Server) -> None:
    """The first, and those behind it."""
    with server.client() as client, contextlib.ExitStack() as stack:
        stack.enter_context(client.hold("late", maximum=1))
        refused: list[NotAvailable] = []

        def give_up(timeout: float) -> None:
            with pytest.raises(NotAvailable) as caught, client.hold("late", maximum=1, timeout=timeout):
                pytest.fail("granted")
            refused.append(caught.value)

        def wait() -> None:
            with client.hold("late", maximum=1):
                pass

        with threads(lambda: give_up(0.3)), threads(lambda: give_up(0.1)), threads(wait):
            wait_until(lambda: len(refused) == 2, "two have given up")
            assert sorted(error.waited or 0 for error in refused) == [0.1, 0.3]
            assert [error.consumption for error in refused] == [1, 1]
            stack.close()


def test_waiting_with_a_huge_timeout(counterd: servers.Server) -> None:
    """A timeout that is too long for a lock counts as unlimited, for the first waiter and for others."""
    with counterd.client() as client, contextlib.ExitStack() as stack:
        stack.enter_context(client.hold("ages", maximum=1))

        def wait(timeout: float) -> None:
            with client.hold("ages", maximum=1, timeout=timeout):
                pass

        with threads(lambda: wait(float("inf")), lambda: wait(1e12), lambda: wait(1e9)):
            counterd.wait_for_waiters(3)
            stack.close()


def test_several_clients_share_permits(server: servers.Server) -> None:
    """None starves, and the use never exceeds the maximum."""
    most, inside, lock = 0, 0, threading.Lock()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(4)]
        got = [0] * len(clients)

        def compete(number: int, client: Client) -> None:
            nonlocal most, inside
            for _ in range(5):
                with client.hold("contended", maximum=2):
                    with lock:
                        inside += 1
                        most = max(most, inside)
                    time.sleep(0.001)
                    with lock:
                        inside -= 1
                got[number] += 1

        work = [lambda number=number, client=client: compete(number, client) for number, client in enumerate(clients)]
        with threads(*work * 2):
            pass
    assert got == [10] * len(clients)
    assert 1 <= most <= 2
    server.wait_for_use("contended", 0)


# ---- sharing a connection -------------------------------------------------------------------------------------------


def test_calls_of_many_threads_get_their_own_answers(server: servers.Server) -> None:
    with server.client() as client:
        client.acquire("noise", maximum=1)
        entry = (b"noise", 1, 1)
        end = time.monotonic() + 1

        def work(number: int) -> None:
            name = f"own{number}"
            for count in itertools.count(1):
                assert client.acquire(name, number, maximum=number * 100) == number
                assert client.get(name) == number
                with pytest.raises(NotAvailable), client.hold(name, maximum=number, timeout=0):
                    pass
                pipe = client.pipeline().get(name).release(name, number).get("none" + name).noop()
                results = pipe.execute()
                assert results[:2] == [number, None]
                assert isinstance(results[2], NotFound)
                assert results[3] is None
                if count % 16 == number:
                    assert entry in [found[:3] for found in client.dump()]
                    assert int(client.stats()["command:acquire"]) > 0
                if time.monotonic() > end:
                    return

        with threads(*[lambda number=number: work(number) for number in range(1, THREADS + 1)]):
            pass
        client.release("noise")
        assert not hears_of_loss(client), "everything was given back"


def test_large_pipelines_of_several_threads(server: servers.Server) -> None:
    """More than the buffers of both sides hold, so a thread has to read while others send."""
    count = 20000
    with server.client(timeout=60) as client:

        def work(number: int) -> None:
            pipe = client.pipeline()
            for _ in range(count):
                pipe.acquire(f"piped{number}" + "x" * 50, maximum=1 << 30).get(f"piped{number}" + "x" * 50)
            assert pipe.execute() == [each for used in range(1, count + 1) for each in (1, used)]

        with threads(*[lambda number=number: work(number) for number in range(4)]):
            pass
        assert [client.get(f"piped{number}" + "x" * 50) for number in range(4)] == [count] * 4
        assert hears_of_loss(client)


def test_a_long_answer_does_not_delay_calls_of_other_threads(counterd: servers.Server) -> None:
    """They are answered when the server answers them, not when the reading thread's own call ends."""
    with counterd.client(timeout=60) as filler, counterd.client(timeout=60) as client:
        pipe = filler.pipeline()
        for number in range(20000):
            pipe.acquire(f"many{number}", maximum=1)
        assert set(pipe.execute()) == {1}
        done: list[str] = []

        def dump() -> None:
            assert len(client.dump()) >= 20000
            done.append("dump")

        with threads(*[dump] * 3):
            for _ in range(3):
                client.noop()
                done.append("noop")
        assert sorted(done) == ["dump"] * 3 + ["noop"] * 3


def test_closing_ends_the_calls_of_other_threads(counterd: servers.Server) -> None:
    with counterd.client() as client, counterd.client() as other:
        other.acquire("closed", maximum=1)
        errors: list[str] = []

        def wait() -> None:
            with pytest.raises(ConnectionLost) as caught, client.hold("closed", maximum=1):
                pytest.fail("granted")
            errors.append(str(caught.value))

        def call() -> None:
            with pytest.raises(ConnectionLost) as caught:
                any(client.noop() for _ in itertools.count())
            errors.append(str(caught.value))

        with threads(*[wait] * 3, *[call] * 3):
            counterd.wait_for_waiters(3)
            client.close()
    assert len(errors) == 6
    assert all("close() was called" in error for error in errors)


def test_a_client_has_no_thread_by_default(counterd: servers.Server) -> None:
    before = threading.active_count()
    with counterd.client() as client, client.hold("alone", maximum=1):
        assert threading.active_count() == before


# ---- as a semaphore -------------------------------------------------------------------------------------------------


def same_calls(semaphore: Any) -> list[Any]:
    """The results of these calls of a semaphore with a value of 2."""
    seen: list[Any] = []

    def note(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            seen.append(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - to be compared
            seen.append(type(error))

    note(semaphore.release)
    note(semaphore.acquire)
    note(semaphore.acquire, False)
    note(semaphore.acquire, False)
    note(semaphore.acquire, timeout=0.01)
    note(semaphore.acquire, timeout=0)
    note(semaphore.acquire, timeout=-1)
    note(semaphore.acquire, True, 0.01)
    note(semaphore.acquire, blocking=False, timeout=1)
    note(semaphore.release, 3)
    note(semaphore.acquire, False)  # nothing was released
    note(semaphore.release, 0)
    note(semaphore.release, -1)
    note(semaphore.release, n=2)
    note(semaphore.release)
    note(semaphore.acquire, timeout=-1)
    note(semaphore.release)
    with semaphore as entered:
        seen.append(entered)
    note(semaphore.release)
    return seen


def test_a_semaphore_behaves_like_that_of_threading(server: servers.Server) -> None:
    with server.client() as client:
        assert same_calls(client.semaphore("semaphore", 2)) == same_calls(threading.BoundedSemaphore(2))
        assert server.used("semaphore") == 0


def test_a_semaphore_of_many_threads_and_clients(server: servers.Server) -> None:
    with server.client() as client, server.client() as other:
        shared = [client.semaphore("shared", 3), other.semaphore("shared", 3)]
        inside: list[int] = []
        most: list[int] = []

        def work(number: int) -> None:
            for _ in range(10):
                with shared[number % 2]:
                    inside.append(number)
                    most.append(len(inside))
                    inside.remove(number)

        with threads(*[lambda number=number: work(number) for number in range(8)]):
            pass
        assert len(most) == 80
        assert max(most) <= 3
    server.wait_for_use("shared", 0)


def test_refusals_are_in_their_places_in_a_pipelines_result(server: servers.Server) -> None:
    with server.client() as client:
        pipe = client.pipeline()
        assert pipe.execute() == []
        pipe.acquire("p", 2, maximum=3).acquire("p", 2, maximum=3).get("p").release("p", 3).release("p", 2).get("p")
        results = pipe.execute()
        assert [each for each in results if not isinstance(each, ServerError)] == [2, 2, None, 0]
        assert isinstance(results[1], NotAvailable)
        assert results[1].name == b"p"
        assert isinstance(results[3], NotAcquired)
        assert pipe.execute() == []
        pipe.acquire("p", maximum=1)
        pipe.get("")
        with pytest.raises(ValueError, match=r"^name"):
            pipe.execute()
        assert server.used("p") == 0
        client.noop()
