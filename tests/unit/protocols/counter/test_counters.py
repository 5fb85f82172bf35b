"""The counter protocol's store: permits, ledger, ring, windows and giving back, driven through sessions in memory.

Everything is audited after each call (`Client` and `settle` do that), so a test contains only what clients would
see."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter._session import open_store
from kit.counters import (
    KEY,
    NO_MEMORY,
    NOT_ACQUIRED,
    NOT_AVAILABLE,
    NOT_FOUND,
    OK,
    RECLAIM_STEPS,
    SLICE_STEPS,
    Client,
    acquire_all,
    figures,
    holders_of,
    make_store,
    release_all,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES: dict[str, Any] = {"buckets": 1, "holdings": 1, "name_memory": 0, "hash_key": KEY, "figures": dict}


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"name-%d" % number for number in range(start, start + count)]


# ---- making a store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"buckets": 0}, "buckets must be at least 1"),
        ({"hash_key": bytes(15)}, "hash_key must have 16 bytes, not 15"),
        ({"hash_key": bytes(17)}, "hash_key must have 16 bytes, not 17"),
        ({"hash_key": b""}, "hash_key must have 16 bytes, not 0"),
        ({"buckets": (1 << 30) + 1}, "at most 1073741824 permits, not 1073741825"),
        ({"holdings": (1 << 30) + 1}, "at most 1073741824 holdings, not 1073741825"),
        ({"buckets": 0xFFFFFFFF}, "at most 1073741824 permits, not 4294967295"),
        ({"name_memory": 0xFFFFFFFF * 64}, "at most 4294967294 blocks of 64 bytes, not 4294967295"),
        ({"name_memory": (1 << 64) - 1}, "at most 4294967294 blocks of 64 bytes, not 288230376151711743"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        open_store(**(SIZES | sizes))


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        *(({name: number}, OverflowError) for name in ("buckets", "holdings") for number in (-1, 1 << 32)),
        *(({"name_memory": number}, OverflowError) for number in (-1, 1 << 64)),
        *(({"hash_key": key}, TypeError) for key in (None, "0123456789abcdef", bytearray(16))),
    ],
)
def test_sizes_of_wrong_type_or_range_are_refused(sizes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        open_store(**(SIZES | sizes))


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_required(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        open_store(**{key: value for key, value in SIZES.items() if key != name})


MAKE_WITHOUT_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from counterd.protocols.counter._session import open_store
try:
    open_store(buckets=1 << 29, holdings=1 << 30, name_memory=0, hash_key=bytes(16), figures=dict)
except MemoryError as error:
    print(error)
"""


def test_a_store_without_memory_raises_memory_error() -> None:
    done = subprocess.run([sys.executable, "-c", MAKE_WITHOUT_MEMORY], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot map ")
    assert done.stdout.endswith(" bytes\n")


def test_the_largest_store_uses_no_memory_before_it_is_used() -> None:
    client = Client(make_store(1 << 29, 1 << 30, name_memory=0xFFFFFFFF * 64 - 1))
    assert client.session.receive(wire.acquire(1, b"a" * 100, 1, 1), 0)[2] == OK
    assert figures(client.store, "records", "holdings", "name_memory") == [1, 1, 128]


def test_an_empty_store_has_nothing_due() -> None:
    store = open_store(**SIZES)
    assert store.next_deadline() == -1
    assert store.take_dirty() == []
    store.tick(0)
    store.audit()
    connections = (1 << 20) + 1  # as there is none with number 0
    sizes_each = (4, 16, 8, 16, 112, 40, 8)  # links, holders, askers, takers, resumptions, blocked, keys of peers
    pages = [-(-size * connections // 4096) for size in sizes_each]
    assert store.snapshot()["region"] <= 4096 * (sum(pages) + 35)  # 20 of these for the timers
    sizes = ("region", "buckets", "holdings_max", "rates_max", "charges_max")
    assert {value for name, value in store.snapshot().items() if name not in sizes} == {0}


# ---- the ledger -----------------------------------------------------------------------------------------------------


def test_a_full_ledger_refuses_new_holdings_and_nothing_else() -> None:
    store = make_store(8, 3)
    one, two = Client(store), Client(store)
    assert [one.acquire(b"a"), one.acquire(b"b"), two.acquire(b"a", 5)] == [OK, OK, OK]
    assert two.acquire(b"b") == NO_MEMORY
    assert one.acquire(b"c") == NO_MEMORY
    assert one.get(b"c") is None
    assert one.acquire(b"a") == OK
    assert two.acquire(b"a") == OK
    assert (one.get(b"a"), one.get(b"b")) == (8, 1)
    assert two.release(b"a") == OK
    assert two.acquire(b"b") == NO_MEMORY
    assert two.acquire(b"b", 1, 1) == NOT_AVAILABLE
    assert two.release(b"a", 5) == OK
    assert two.acquire(b"b") == OK
    assert figures(store, "holdings", "holdings_max", "objects") == [3, 3, 2]
    assert Client(make_store(2, 0)).acquire(b"a") == NO_MEMORY


def test_the_holdings_of_each_connection_are_bounded() -> None:
    store = make_store(8, 8, holdings_per_connection=2)
    one, two = Client(store), Client(store)
    assert [one.acquire(b"a"), one.acquire(b"b"), one.acquire(b"c")] == [OK, OK, NO_MEMORY]
    assert [two.acquire(b"c"), two.acquire(b"a"), two.acquire(b"b")] == [OK, OK, NO_MEMORY]
    assert one.acquire(b"c") == NO_MEMORY
    assert one.acquire(b"b", 4) == OK
    assert one.release(b"a") == OK
    assert one.acquire(b"c") == OK


def test_the_bound_of_holdings_can_change() -> None:
    store = make_store(8, 4)
    client = Client(store)
    acquire_all(client, [b"a", b"b", b"c"])
    store.limit_holdings(2)
    assert client.acquire(b"d") == NO_MEMORY
    assert client.acquire(b"a") == OK
    assert client.release(b"c") == OK
    assert client.acquire(b"c") == NO_MEMORY
    assert client.release(b"b") == OK
    assert client.acquire(b"c") == OK
    store.limit_holdings(0)
    acquire_all(client, [b"d", b"e"])
    assert client.acquire(b"f") == NO_MEMORY


def test_an_acquire_refused_for_lack_of_a_record_leaves_no_holding() -> None:
    client = Client(make_store(1, 4))
    assert client.acquire(b"a") == OK
    assert client.acquire(b"b") == NO_MEMORY
    assert figures(client.store, "holdings", "records", "objects", "total_objects") == [1, 1, 1, 1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_holders_leave_a_counter_in_any_order(order: tuple[int, ...]) -> None:
    store = make_store(2, 8)
    clients = [Client(store) for _ in range(4)]
    for number, client in enumerate(clients):
        client.now_ns = number * 1_000_000_000
        assert client.acquire(b"a", 1 << number) == OK
    connections = {amount: connection for connection, amount, _ in holders_of(store, b"a")}
    assert len(set(connections.values())) == 4
    left = set(range(4))
    for number in order:
        assert sorted(holders_of(store, b"a")) == sorted((connections[1 << n], 1 << n, 10 * n) for n in left)
        assert clients[number].release(b"a", 1 << number) == OK
        left.remove(number)
        assert clients[number].get(b"a") == sum(1 << other for other in left)
    assert holders_of(store, b"a") == []


@pytest.mark.parametrize("order", list(itertools.permutations(b"abcd")))
def test_holdings_leave_a_connection_in_any_order(order: tuple[int, ...]) -> None:
    client = Client(make_store(4, 4))
    acquire_all(client, [b"a", b"b", b"c", b"d"])
    for count, letter in enumerate(order, 1):
        assert client.release(bytes([letter]), 2) == NOT_ACQUIRED
        assert client.release(bytes([letter])) == OK
        assert client.release(bytes([letter])) == NOT_ACQUIRED
        assert client.store.snapshot()["holdings"] == 4 - count


def test_since_is_when_a_holding_began() -> None:
    client = Client(make_store())
    for now_ns, expected in ((0, 0), (99_999_999, 0), (1_250_000_000, 0)):
        client.now_ns = now_ns
        assert client.acquire(b"a") == OK
        assert [since for _, _, since in holders_of(client.store, b"a")] == [expected]
    assert client.release(b"a", 3) == OK
    assert client.acquire(b"a") == OK
    assert [since for _, _, since in holders_of(client.store, b"a")] == [12]


def test_an_unknown_counter_has_no_holders() -> None:
    store = make_store()
    for name in (b"", b"a", b"x" * 70_000):
        assert holders_of(store, name) == []
    with pytest.raises(TypeError):
        holders_of(store, None)  # type: ignore[arg-type]


# ---- idle counters --------------------------------------------------------------------------------------------------


def test_the_counter_idle_for_longest_is_reclaimed() -> None:
    client = Client(make_store(3, 8))
    acquire_all(client, [b"a", b"b", b"c"])
    release_all(client, [b"b", b"c", b"a"])
    for new, gone in ((b"d", b"b"), (b"e", b"c"), (b"f", b"a")):
        assert client.get(gone) == 0
        assert client.acquire(new) == OK
        assert client.get(gone) is None
    assert client.acquire(b"g") == NO_MEMORY
    assert client.store.next_deadline() == -1
    assert figures(client.store, "reclaimed", "expired", "total_objects", "objects") == [3, 0, 6, 3]


def test_a_counter_that_was_used_again_is_not_reclaimed() -> None:
    client = Client(make_store(2, 8))
    acquire_all(client, [b"a", b"b"])
    release_all(client, [b"a", b"b"])
    acquire_all(client, [b"a"])
    assert client.acquire(b"c") == OK
    assert (client.get(b"a"), client.get(b"b"), client.get(b"c")) == (1, None, 1)


def test_a_counter_keeps_its_place_in_the_ring_while_it_is_used_in_between() -> None:
    """The ring is lazy: an entry is removed when it is met, not when the counter is used."""
    client = Client(make_store(2, 8))
    acquire_all(client, [b"a", b"b"])
    release_all(client, [b"a", b"b"])
    acquire_all(client, [b"a"])
    release_all(client, [b"a"])
    assert client.acquire(b"c") == OK
    assert (client.get(b"a"), client.get(b"b")) == (None, 0)
    assert client.acquire(b"d") == OK
    assert client.get(b"b") is None
    release_all(client, [b"d", b"c"])
    acquire_all(client, [b"e", b"f"])
    assert (client.get(b"c"), client.get(b"d")) == (None, None)


def test_a_counter_enters_the_ring_again_after_its_place_was_met() -> None:
    client = Client(make_store(2, 8))
    acquire_all(client, [b"a", b"b"])
    for _ in range(5):
        release_all(client, [b"a"])
        acquire_all(client, [b"a"])
        assert client.acquire(b"c") == NO_MEMORY
    release_all(client, [b"a"])
    assert client.acquire(b"c") == OK
    assert client.store.snapshot()["reclaimed"] == 1


@pytest.mark.parametrize(("stale", "status"), [(RECLAIM_STEPS - 1, OK), (RECLAIM_STEPS, NO_MEMORY)])
def test_a_request_examines_a_bounded_part_of_the_ring(stale: int, status: int) -> None:
    count = stale + 1
    client = Client(make_store(count, 4 * count))
    names = numbered(count)
    acquire_all(client, names)
    release_all(client, names)
    acquire_all(client, names[:stale])
    assert client.store.next_deadline() == -1
    assert client.acquire(b"new") == status
    assert client.get(names[-1]) == (None if status == OK else 0)
    assert client.store.next_deadline() == (-1 if status == OK else 0)
    settle(client.store)
    if status == NO_MEMORY:
        assert client.get(names[-1]) == 0
        assert client.acquire(b"new") == OK
    assert figures(client.store, "reclaimed", "busy", "idle") == [1, count, 0]


# ---- windows and the sweep ------------------------------------------------------------------------------------------


def test_an_idle_counter_expires_with_its_window_before_the_sweep() -> None:
    client = Client(make_store())
    store = client.store
    acquire_all(client, [b"idle", b"busy"])
    release_all(client, [b"idle"])
    assert client.get(b"idle") == 0
    store.begin_window(1)
    assert client.get(b"idle") is None
    assert client.release(b"idle", 0) == NOT_FOUND
    assert client.release(b"idle") == NOT_FOUND
    assert client.dump() == {b"busy": (1, 1)}
    assert holders_of(store, b"idle") == []
    assert store.next_deadline() == 0
    assert figures(store, "objects", "records", "idle", "expired") == [1, 2, 0, 0]
    settle(store)
    assert figures(store, "objects", "records", "idle", "expired", "gc_count") == [1, 1, 0, 1, 1]
    assert client.get(b"idle") is None


def test_an_expired_counter_can_be_acquired_before_the_sweep() -> None:
    client = Client(make_store())
    store = client.store
    assert client.acquire(b"a", 5) == OK
    assert client.release(b"a", 5) == OK
    store.begin_window(1)
    assert client.acquire(b"a", 2) == OK
    assert client.dump() == {b"a": (2, 2)}
    assert figures(store, "objects", "total_objects", "records") == [1, 2, 1]
    settle(store)
    assert client.get(b"a") == 2
    assert store.snapshot()["expired"] == 0
    assert client.release(b"a", 2) == OK
    assert client.get(b"a") == 0
    store.begin_window(2)
    settle(store)
    assert store.snapshot()["expired"] == 1


def test_an_expired_counter_that_makes_room_counts_as_expired() -> None:
    client = Client(make_store(1, 4))
    assert client.acquire(b"a") == OK
    assert client.release(b"a") == OK
    client.store.begin_window(1)
    assert client.acquire(b"b") == OK
    assert figures(client.store, "expired", "reclaimed") == [1, 0]
    assert client.store.next_deadline() == -1


def test_get_and_refused_requests_do_not_count_as_use() -> None:
    client = Client(make_store())
    assert client.acquire(b"a", 2) == OK
    assert client.release(b"a", 2) == OK
    assert client.get(b"a") == 0
    assert client.release(b"a", 0) == OK
    assert client.release(b"a", 1) == NOT_ACQUIRED
    client.store.begin_window(1)
    assert client.get(b"a") is None
    assert client.acquire(b"a", 2) == OK
    client.store.begin_window(2)
    assert client.acquire(b"a", 2, 3) == NOT_AVAILABLE
    assert client.release(b"a", 0) == OK
    assert client.release(b"a", 3) == NOT_ACQUIRED
    client.close()
    settle(client.store)
    assert Client(client.store).get(b"a") == 0


def test_window_numbers_only_rise() -> None:
    client = Client(make_store())
    store = client.store
    for number, window in ((0, 0), (5, 5), (5, 5), (4, 5), (0, 5), (6, 6), (0xFFFFFFFF, 0xFFFFFFFF), (7, 0xFFFFFFFF)):
        assert client.acquire(b"a") == OK
        assert client.release(b"a") == OK
        before = store.snapshot()["window"]
        store.begin_window(number)
        assert store.snapshot()["window"] == window
        assert client.get(b"a") == (0 if window == before else None)
    for wrong in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            store.begin_window(wrong)
    settle(store)
    assert client.get(b"a") == 0


def test_the_peak_is_of_the_window() -> None:
    client = Client(make_store())
    store = client.store
    assert client.acquire(b"a", 5) == OK
    assert client.release(b"a", 3) == OK
    assert client.dump() == {b"a": (2, 5)}
    assert client.acquire(b"a", 2) == OK
    assert client.dump() == {b"a": (4, 5)}
    assert client.acquire(b"a", 2) == OK
    assert client.dump() == {b"a": (6, 6)}
    assert client.acquire(b"a", 2) == OK
    assert client.release(b"a", 2) == OK
    assert client.dump() == {b"a": (6, 8)}
    store.begin_window(1)
    assert client.dump() == {b"a": (6, 6)}
    assert client.release(b"a", 4) == OK
    assert client.dump() == {b"a": (2, 6)}
    store.begin_window(2)
    assert client.dump() == {b"a": (2, 2)}
    assert client.acquire(b"a", 1) == OK
    assert client.dump() == {b"a": (3, 3)}
    assert client.release(b"a", 3) == OK
    assert client.dump() == {b"a": (0, 3)}
    assert client.acquire(b"a", 1) == OK
    assert client.dump() == {b"a": (1, 3)}


def test_a_release_after_a_disconnect_counts_in_its_own_window() -> None:
    store = make_store()
    leaver, other = Client(store), Client(store)
    assert leaver.acquire(b"a", 4) == OK
    store.begin_window(1)
    leaver.close()
    store.begin_window(2)
    assert other.dump() == {b"a": (4, 4)}
    settle(store)
    assert other.dump() == {b"a": (0, 4)}


def test_the_sweep_runs_in_slices_once_around_the_ring() -> None:
    count = 3 * SLICE_STEPS
    client = Client(make_store(count, 2 * count))
    store = client.store
    acquire_all(client, numbered(count))
    release_all(client, numbered(count))
    acquire_all(client, numbered(count)[::2])
    store.begin_window(1)
    ticks = 0
    while store.next_deadline() == 0:
        freed = store.snapshot()["expired"]
        store.tick(1_000_000 + ticks * 500_000)
        ticks += 1
        assert freed < store.snapshot()["expired"] <= freed + SLICE_STEPS
        assert store.snapshot()["gc_count"] == (store.next_deadline() == -1)
        release_all(client, numbered(count)[2 * ticks : 2 * ticks + 1])
    assert ticks >= 3
    assert figures(store, "expired", "records", "idle") == [count // 2, count // 2, ticks]
    assert figures(store, "last_gc_elapsed", "total_gc_elapsed") == [(ticks - 1) * 500] * 2
    store.begin_window(2)
    settle(store)
    assert figures(store, "gc_count", "last_gc_elapsed", "records") == [2, 0, count // 2 - ticks]


def test_requests_may_finish_a_sweep() -> None:
    """Acquires between two ticks can meet all that the sweep has left: the next sweep begins at its own time."""
    count = SLICE_STEPS + 100
    client = Client(make_store(count, 2 * count))
    store = client.store
    acquire_all(client, numbered(count))
    release_all(client, numbered(count))
    store.begin_window(1)
    store.tick(1_000_000_000)
    assert store.next_deadline() == 0
    acquire_all(client, numbered(count, start=count))
    assert store.next_deadline() == -1
    release_all(client, numbered(count, start=count))
    store.begin_window(2)
    ticks = 0
    while store.next_deadline() == 0 and ticks < 100:
        store.tick(9_000_000_000 + ticks * 500_000)
        ticks += 1
    assert store.snapshot()["last_gc_elapsed"] == (ticks - 1) * 500 > 0


# ---- giving back ----------------------------------------------------------------------------------------------------


def test_holdings_of_an_ended_connection_count_until_they_are_given_back() -> None:
    store = make_store()
    leaver, other = Client(store), Client(store)
    assert leaver.acquire(b"a", 3) == OK
    assert other.acquire(b"a", 1) == OK
    leaver.close()
    assert store.next_deadline() == 0
    assert figures(store, "holdings_leaving", "given_back", "curr_connections") == [1, 0, 1]
    assert other.acquire(b"a", 1, 4) == NOT_AVAILABLE
    assert other.release(b"a", 2) == NOT_ACQUIRED
    store.tick(0)
    store.audit()
    assert store.next_deadline() == -1
    assert figures(store, "holdings_leaving", "given_back") == [0, 1]
    assert other.acquire(b"a", 3, 4) == OK


def test_holdings_of_an_ended_connection_use_the_ledger_until_given_back() -> None:
    store = make_store(4, 1)
    leaver, other = Client(store), Client(store)
    assert leaver.acquire(b"a") == OK
    leaver.close()
    assert other.acquire(b"b") == NO_MEMORY
    settle(store)
    assert other.acquire(b"b") == OK


def test_holdings_are_given_back_in_slices_in_the_order_of_the_ends() -> None:
    count = 2 * SLICE_STEPS - 1
    store = make_store(count, 3 * count)
    names = numbered(count)
    leavers = [Client(store), Client(store)]
    for leaver in leavers:
        acquire_all(leaver, names)
    other = Client(store)
    assert other.acquire(names[0], 2) == OK
    for leaver in leavers:
        leaver.close()
    ticks = 0
    while store.next_deadline() == 0:
        given_back = store.snapshot()["given_back"]
        first, second = min(given_back, count), max(0, given_back - count)
        assert store.snapshot()["holdings_leaving"] == 2 * count - given_back
        assert other.get(names[0]) == 2 + (first < count) + (second < count)
        assert [other.get(names[place]) for place in (1, -1)] == [
            (first < count - 1) + (second < count - 1),
            (first < 1) + (second < 1),
        ]
        store.tick(0)
        assert given_back < store.snapshot()["given_back"] <= given_back + SLICE_STEPS
        ticks += 1
    assert ticks >= 4
    assert figures(store, "given_back", "holdings_leaving", "holdings") == [2 * count, 0, 1]
    assert [other.get(names[place]) for place in (0, 1, -1)] == [2, 0, 0]


def test_each_holding_is_given_back_once_after_repeated_ends() -> None:
    store = make_store()
    leaver, other = Client(store), Client(store)
    assert leaver.acquire(b"a", 3) == OK
    assert other.acquire(b"a", 3) == OK
    assert leaver.session.eof(0) == b""
    assert leaver.session.closing
    for _ in range(3):
        leaver.close()
        settle(store)
    assert leaver.session.eof(0) == b""
    assert (other.get(b"a"), store.snapshot()["given_back"], store.sessions_open) == (3, 1, 1)


def test_a_freed_session_gives_its_holdings_back() -> None:
    store = make_store()
    leaver, other = Client(store), Client(store)
    assert leaver.acquire(b"a") == OK
    del leaver
    assert store.sessions_open == 1
    settle(store)
    assert other.get(b"a") == 0


DROP_A_CYCLE = """
import gc
from counterd.protocols.counter import wire
from kit.counters import make_store, settle
store = make_store()
session = store.session()
session.receive(wire.acquire(1, b"a", 1, 1), 0)
session.owner = [session]
del session
gc.collect()
settle(store)
print(store.sessions_open, store.snapshot()["busy"], store.snapshot()["given_back"])
"""


def test_a_garbage_collected_session_gives_its_holdings_back() -> None:
    """As when a loop is thrown away with its connections. In a process of its own, as a mistake could end it."""
    script = f"import sys; sys.path[:] = {sys.path!r}\n{DROP_A_CYCLE}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 0 1\n"), done.stderr


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_by_hand")
def test_a_session_collected_during_a_call_gives_back_after_it() -> None:
    """Python code runs within a Stats, and so the collector may."""
    store = make_store(figures=lambda: {"collected": gc.collect()})
    asker, leaver = Client(store), Client(store)
    assert leaver.acquire(b"a") == OK
    leaver.session.owner = leaver
    del leaver
    assert asker.raw(wire.stats(1))[2] == OK
    assert store.sessions_open == 1
    assert figures(store, "busy", "holdings_leaving") == [1, 0]
    assert store.next_deadline() == 0
    settle(store)
    assert figures(store, "busy", "given_back") == [0, 1]


def test_the_number_of_a_connection_is_not_used_again_before_all_is_given_back() -> None:
    store = make_store()
    leaver = Client(store)
    assert leaver.acquire(b"a") == OK
    leaver.close()
    newcomer = Client(store)
    assert newcomer.release(b"a") == NOT_ACQUIRED
    assert newcomer.acquire(b"a", 2) == OK
    assert len({connection for connection, _, _ in holders_of(store, b"a")}) == 2
    settle(store)
    assert Client(store).release(b"a") == NOT_ACQUIRED
    assert newcomer.release(b"a", 2) == OK


def test_a_half_closed_connection_gives_back_before_its_replies_are_read() -> None:
    store = make_store(4096, 8192)
    acquire_all(Client(store), numbered(3000))
    leaver = Client(store)
    assert leaver.acquire(b"held") == OK
    leaver.session.receive(wire.dump(1), 0)
    leaver.session.eof(0)
    assert leaver.session.more
    settle(store)
    assert holders_of(store, b"held") == []
    assert leaver.session.more


def test_the_end_of_a_connection_without_holdings_causes_no_work() -> None:
    store = make_store()
    for end in ("closed", "eof"):
        client = Client(store)
        assert client.acquire(b"a") == OK
        assert client.release(b"a") == OK
        getattr(client.session, end)(0)
        assert store.next_deadline() == -1
    store.audit()


def test_the_number_of_sessions_is_bounded() -> None:
    store = make_store()
    sessions = [store.session() for _ in range(1 << 20)]
    with pytest.raises(MemoryError, match=r"^1048576 connections are open or ending$"):
        store.session()
    assert (store.sessions_open, store.sessions_total) == (1 << 20, 1 << 20)
    assert sessions[-1].receive(wire.acquire(1, b"a", 1, 1), 0)[2] == OK
    sessions.pop().closed(0)
    with pytest.raises(MemoryError):
        store.session()
    store.tick(0)
    store.session().closed(0)
    del sessions
    gc.collect()
    assert store.sessions_open == 0


def test_leases_are_listed_by_connection_including_ended_ones() -> None:
    store = make_store(8, 20, name_memory=640)
    clients = [Client(store) for _ in range(4)]
    for number in (2, 0, 3):
        for name in (b"x", b"y" * 60)[: number or 1]:
            clients[number].now_ns = number * 1_000_000_000
            assert clients[number].acquire(name, number + 1) == OK
    assert store.leases(100) == [
        (1, b"x", 1, 0),
        (3, b"y" * 60, 3, 20),
        (3, b"x", 3, 20),
        (4, b"y" * 60, 4, 30),
        (4, b"x", 4, 30),
    ]
    assert [len(store.leases(limit)) for limit in range(7)] == [0, 1, 2, 3, 4, 5, 5]
    assert [store.holdings_of(number) for number in (0, 1, 2, 3, 4, 5, (1 << 32) - 1)] == [0, 1, 0, 2, 2, 0, 0]
    clients[2].close()
    assert (store.held(), store.holdings_of(3), len(store.leases(100))) == (5, 2, 5)
    settle(store)
    assert (store.held(), store.holdings_of(3), len(store.leases(100))) == (3, 0, 3)
