"""The policy of a daemon that shares limits, with a store and a Redis in memory, and a clock that the tests set."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from counterd.cluster import authority, sidecar
from counterd.cluster.sidecar import (
    CALM_MAX,
    MIN_GAP_NS,
    MS,
    PRESENCE,
    SECOND,
    SPARE,
    TICK_NS,
    URGENT_MAX,
    _calm_ns,
)
from kit import shared_store
from kit.sidecars import LEASE_MS, NAME, PART, START_NS, Machine, Server, fill, pair, pass_time


@pytest.fixture
def server() -> Server:
    return Server()


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_the_first_request_is_asked_for_and_later_ones_are_not(server: Server) -> None:
    machine = Machine(server)
    machine.ask()
    assert machine.grants == []
    assert machine.turn()
    machine.ask()
    assert len(machine.grants) == 2
    assert machine.rights == 2 + SPARE
    assert not machine.turn(), "there is nothing to say, and it is too early"


def test_nothing_is_said_while_nothing_is_shared_but_to_a_new_server(server: Server) -> None:
    """A server has to begin to learn before the first request."""
    machine = Machine(server)
    assert machine.turn()
    assert pass_time(server, 10 * SECOND, machine) == 0
    server.run = "run-1"
    assert machine.turn()


def test_each_sidecar_is_counted_in_one_partition(server: Server) -> None:
    machine = Machine(server)
    for partition, renews in ((PRESENCE, True), (PRESENCE + 1, False)):
        call = machine.sidecar.call(partition, server.run, server.now_ns)
        assert call is not None
        machine.sidecar.answered(partition, server.tick(*call), server.now_ns)
        server.advance(LEASE_MS * MS // 2)
        assert (machine.sidecar.call(partition, server.run, server.now_ns) is not None) == renews


def test_a_sidecar_has_no_more_idle_rights_than_its_part_of_the_headroom(server: Server) -> None:
    one, other = pair(server)
    for _ in range(400):
        one.ask(maximum=1000)
        one.turn()
        server.advance(3 * MS)
    assert one.used == 400
    assert 400 < one.rights <= 400 + 1000 // (8 * 2)
    assert other.rights == 0


def test_idle_rights_go_back(server: Server) -> None:
    machine = Machine(server)
    for _ in range(80):
        machine.ask(maximum=1000)
        machine.turn()
        server.advance(3 * MS)
    machine.release(79)
    pass_time(server, 300 * MS, machine)
    assert machine.used == 1
    assert machine.rights < 40
    pass_time(server, 2 * SECOND, machine)
    assert machine.rights <= 3 + SPARE


def test_with_few_permits_each_request_is_asked_for_and_what_is_free_goes_back_at_once(server: Server) -> None:
    one, other = pair(server)
    one.ask(maximum=3)
    one.turn()
    assert (one.used, one.rights) == (1, 1)
    one.release()
    server.advance(3 * MS)
    assert one.turn()
    other.ask(3, maximum=3)
    other.turn()
    assert other.used == 3


def test_a_request_with_another_maximum_is_asked_for_alone(server: Server) -> None:
    """What it was granted is for no other request, as others may have more by then."""
    machine = Machine(server)
    machine.ask(maximum=100)
    machine.turn()
    machine.ask(maximum=5)
    server.advance(3 * MS)
    machine.turn()
    assert machine.used == 2
    machine.release(2)
    assert machine.rights == 0
    machine.ask(maximum=5)
    assert len(machine.grants) == 2
    server.advance(3 * MS)
    machine.turn()
    assert len(machine.grants) == 3


def test_what_is_not_granted_is_refused(server: Server) -> None:
    one, other = pair(server)
    one.ask(10, maximum=10)
    one.turn()
    request = other.ask(maximum=10)
    other.turn()
    assert other.refusals == [request]
    assert other.sidecar.figures(server.now_ns)["refused"] == 1
    assert other.sidecar.figures(server.now_ns)["refused_in_vain"] == 0


def test_a_refusal_although_permits_were_free_is_counted(server: Server) -> None:
    one, other = pair(server)
    one.ask(1000, maximum=1000)
    one.turn()
    one.release(900)
    server.advance(101 * MS)
    one.turn()
    assert one.rights == 100 + 1000 // (8 * 2)
    other.ask(900, maximum=1000)
    other.turn()
    assert other.sidecar.figures(server.now_ns)["refused_in_vain"] == 1


# ---- turns ----------------------------------------------------------------------------------------------------------


def test_what_becomes_free_goes_to_who_waits_elsewhere(server: Server) -> None:
    one, other = pair(server)
    one.ask(10, maximum=10)
    one.turn()
    waiting = other.ask(maximum=10, stays=True)
    other.turn()
    pass_time(server, 1200 * MS, one, other)  # by then each sidecar has heard of it
    one.release()
    assert one.rights == 9
    pass_time(server, 20 * MS, one, other)
    assert other.grants == [waiting]


def test_idle_rights_go_to_who_waits_elsewhere(server: Server) -> None:
    one, other = pair(server)
    one.ask(999, maximum=1000)
    one.turn()
    assert one.rights == 1000
    waiting = other.ask(maximum=1000, stays=True)
    pass_time(server, 120 * MS, one, other)
    assert other.grants == [waiting]


def test_both_serve_those_that_wait_in_turns(server: Server) -> None:
    """One permit, always wanted by three at each of two machines, and held for 5 ms."""
    one, other = pair(server)
    for _ in range(3):
        one.ask(maximum=1, stays=True)
        other.ask(maximum=1, stays=True)
    held: list[tuple[int, str]] = []
    for _ in range(400):
        pass_time(server, 5 * MS, one, other)
        assert one.used + other.used <= 1
        for name, machine in (("one", one), ("other", other)):
            if machine.used:
                held.append((server.now_ns, name))
                machine.release()
                machine.ask(maximum=1, stays=True)
    turns = [name for name, _ in itertools.groupby(name for _, name in held)]
    assert len(held) > 300, "of 400 times it was in use"
    assert 12 <= len(turns) <= 25, "a turn of about 100 ms each, in 2 s"


def test_who_has_no_more_than_a_fair_share_has_longer_turns(server: Server) -> None:
    one, other = pair(server)
    for _ in range(9):
        one.ask(maximum=4, stays=True)
        other.ask(maximum=4, stays=True)
    held: list[int] = []
    for round_ in range(500):
        pass_time(server, 5 * MS, one, other)
        for machine in (one, other):
            for _ in range(machine.used):
                machine.release()
                machine.ask(maximum=4, stays=True)
        if round_ > 300:
            held += one.used, other.used
    assert sum(held) > 0.9 * 4 * 199
    assert 0.8 < sum(held[::2]) / sum(held[1::2]) < 1.25


# ---- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_ends_here_before_it_ends_at_the_authority(server: Server) -> None:
    machine = Machine(server)
    machine.ask()
    machine.turn()
    assert machine.store.until_ns[PART] == START_NS + 9 * SECOND
    server.advance(9 * SECOND)
    assert machine.ask() not in machine.grants
    assert machine.turn()
    assert machine.dropped == [NAME]
    figures = machine.sidecar.figures(server.now_ns)
    assert figures["lost"] == 1
    assert len(machine.grants) == 2, "with a new lease"


def test_a_lease_is_renewed(server: Server) -> None:
    machine = Machine(server)
    machine.ask()
    assert 10 <= pass_time(server, 20 * SECOND, machine) <= 40
    assert machine.dropped == []
    assert machine.sidecar.figures(server.now_ns)["lease_age"] <= 1.1


def test_a_sidecar_without_anything_lets_its_lease_end(server: Server) -> None:
    machine = Machine(server)
    machine.ask()
    machine.turn()
    machine.release()
    pass_time(server, 20 * SECOND, machine)
    assert machine.dropped == []
    assert machine.sidecar.figures(server.now_ns)["lost"] == machine.sidecar.figures(server.now_ns)["leases"] == 0
    machine.ask()
    machine.turn()
    assert len(machine.grants) == 2


def test_connections_are_dropped_once_for_a_lease(server: Server) -> None:
    """The store drops them when the lease ends. What it grants afterwards, as a policy says, is not dropped."""
    machine = Machine(server)
    machine.ask()
    machine.turn()
    server.advance(9 * SECOND)
    machine.store.turn(server.now_ns)
    assert machine.dropped == [NAME]
    machine.turn()
    assert machine.dropped == [NAME]


def test_an_answer_after_the_end_of_the_lease_is_too_late(server: Server) -> None:
    """The store has forgotten what rights it had, so the authority gets them back with the lease."""
    machine, (first, second) = fill(server, 2)
    until_ns = machine.store.until_ns[PART]
    server.advance(until_ns - MS - server.now_ns)
    machine.ask(50, name=first)
    call = machine.send()
    assert call is not None
    found = server.tick(*call)
    server.advance(2 * MS)
    machine.store.turn(server.now_ns)
    machine.sidecar.answered(PART, found, server.now_ns)
    pass_time(server, 11 * SECOND, machine)
    other = Machine(server)
    for name in (first, second):
        other.ask(100 - machine.store.share(name).used, name=name)
    other.turn()
    assert len(other.grants) == 2


def test_a_lost_lease_means_a_new_name(server: Server) -> None:
    machine = Machine(server, drops=False)
    machine.ask(5, maximum=100)
    machine.turn()
    server.data[authority.keys(PART, "")[0].encode()][b"s1"] = 1.0
    machine.ask(13, maximum=100)
    server.advance(3 * MS)
    machine.turn()
    assert machine.rights == 0
    server.advance(3 * MS)
    keys, arguments = machine.send() or ([], [])
    assert (keys[-1].rpartition(":")[2], *arguments[:2]) == ("s2", "s2", 1)
    machine.sidecar.answered(PART, server.tick(keys, arguments), server.now_ns)
    pass_time(server, 500 * MS, machine)
    assert machine.used == 18
    assert machine.rights >= 18, "also for what was kept"


def test_a_farewell_gives_all_back(server: Server) -> None:
    one, other = pair(server)
    one.ask(100, maximum=100)
    one.turn()
    server.tick(*one.sidecar.farewell(PART))
    other.ask(100, maximum=100)
    other.turn()
    assert other.used == 100


def test_an_answer_after_the_farewell_is_ignored(server: Server) -> None:
    machine = Machine(server)
    machine.ask()
    call = machine.send()
    assert call is not None
    found = server.tick(*call)
    machine.sidecar.farewell(PART)
    machine.sidecar.answered(PART, found, server.now_ns)
    machine.sidecar.failed(PART, server.now_ns)
    assert machine.store.until_ns[PART] == 0
    assert machine.store.reachable[PART]


# ---- calls that fail ------------------------------------------------------------------------------------------------


def test_a_call_without_an_answer_is_made_again(server: Server) -> None:
    machine = Machine(server)
    machine.ask(stays=True)
    waits = []
    for _ in range(6):
        assert machine.send() is not None
        machine.sidecar.failed(PART, server.now_ns)
        assert not machine.store.reachable[PART]
        assert machine.send() is None
        waits.append((machine.sidecar.next_call_ns(PART) - server.now_ns) // MS)
        server.advance(waits[-1] * MS)
    assert waits == [100, 200, 400, 800, 1000, 1000]
    assert machine.turn()
    assert machine.store.reachable[PART]
    server.advance(3 * MS)
    assert machine.turn(), "under another name, as the server does not know the first one"
    assert len(machine.grants) == 1


def test_an_answer_that_was_lost_gives_nothing_twice(server: Server) -> None:
    machine = Machine(server)
    machine.ask(60, maximum=100)
    call = machine.send()
    assert call is not None
    server.tick(*call)
    machine.sidecar.failed(PART, server.now_ns)
    machine.ask(60, maximum=100)
    server.advance(101 * MS)
    assert machine.turn()
    other = Machine(server)
    other.ask(41, maximum=100)
    other.turn()
    assert (machine.used, other.used) in {(0, 41), (60, 0)}


def test_a_call_that_was_repeated_is_forgotten(server: Server) -> None:
    machine = Machine(server)
    machine.ask(stays=True)
    call = machine.send()
    assert call is not None
    server.tick(*call)
    machine.sidecar.answered(PART, server.tick(*call), server.now_ns)
    assert machine.grants == []
    server.advance(3 * MS)
    machine.turn()
    assert len(machine.grants) == 1


@pytest.mark.parametrize("is_repeated", [False, True])
def test_rights_of_an_answer_that_was_lost_go_back_although_nobody_wants_them(
    server: Server, is_repeated: bool
) -> None:
    one, other = pair(server)
    one.ask(10, maximum=100)
    one.turn()
    pass_time(server, SECOND, one)
    request = one.ask(60, maximum=100, stays=True)
    call = one.send()
    assert call is not None
    found = server.tick(*call)
    one.store.give_up(request)
    if is_repeated:
        one.sidecar.answered(PART, server.tick(*call), server.now_ns)
    else:
        assert found
        one.sidecar.failed(PART, server.now_ns)
    pass_time(server, 2 * SECOND, one)
    other.ask(80, maximum=100)
    other.turn()
    assert (one.used, other.used) == (10, 80)


def test_what_is_known_is_not_told_again(server: Server) -> None:
    """Idle rights within the headroom stay."""
    machine = Machine(server)
    machine.ask(maximum=1000)
    machine.turn()
    pass_time(server, SECOND, machine)
    assert machine.rights > machine.used
    before = machine.store.share(NAME).calls
    assert pass_time(server, SECOND, machine) <= 2
    assert machine.store.share(NAME).calls - before <= 11, "looked at once in a tick"
    machine.release()
    assert len(machine.grants) == 1


def test_an_answer_without_sense(server: Server) -> None:
    machine = Machine(server)
    for answer in ([2, 0, 9, 1, 5, [], b"", b""], [2, 0, 9, 1, 5, [], b"x", b""], [2, 0], [], None):
        machine.ask(stays=True)
        assert machine.send() is not None
        with pytest.raises(ValueError, match="the authority answered"):
            machine.sidecar.answered(PART, answer, server.now_ns)
        assert not machine.store.reachable[PART]
        server.advance(SECOND)


def test_calls_keep_a_distance(server: Server) -> None:
    machine = Machine(server)
    machine.ask()
    machine.turn()
    machine.ask(50)
    assert not machine.turn()
    assert machine.sidecar.next_call_ns(PART) == server.now_ns + 2 * MS
    server.advance(2 * MS)
    assert machine.turn()


def test_many_requests_take_several_calls_one_soon_after_the_other(server: Server) -> None:
    machine, _ = fill(server, URGENT_MAX * 3)
    assert machine.sidecar.figures(server.now_ns)["calls"] <= 5
    assert server.now_ns - START_NS == 3 * 3 * MS, "the machine looks every 3 ms"


def spoken(monkeypatch: pytest.MonkeyPatch, server: Server) -> list[int]:
    """The bytes of the arguments of each call from now on."""
    sizes: list[int] = []
    tick = server.tick

    def heard(keys: list[str], arguments: list[Any]) -> Any:
        sizes.append(sum(len(each) for each in arguments if isinstance(each, bytes)))
        return tick(keys, arguments)

    monkeypatch.setattr(server, "tick", heard)
    return sizes


def test_a_call_has_a_bound_of_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room is told soon after. So are all names to a server that is new, before it has learnt."""
    for each in (sidecar, shared_store):
        monkeypatch.setattr(each, "NEWS_BYTES_MAX", 4500)
    sizes = spoken(monkeypatch, server)
    machine, found = fill(server, 50, size=1000)
    assert machine.sidecar.figures(server.now_ns)["calls"] <= 11, "five names each"
    new_server(server)
    server.advance(MIN_GAP_NS)
    assert machine.turn()
    pass_time(server, 200 * MS, machine)
    totals = server.data[authority.keys(PART, "")[2].encode()]
    assert {*found} <= {*totals}
    pass_time(server, 11 * SECOND, machine)
    assert machine.dropped == []
    for name in found:
        machine.release(name=name)
    pass_time(server, 10 * SECOND, machine)
    assert not server.data.get(authority.keys(PART, "")[2].encode()), "everything has gone back"
    assert max(sizes) < 2 * 5 * (1010 + 60), "urgent and calm ones, each a name and numbers"


@pytest.mark.parametrize("partition", [PART, PRESENCE], ids=["in use", "only a lease"])
def test_a_call_that_is_due_has_something_to_say(server: Server, partition: int) -> None:
    """Or the daemon would ask itself again and again. Also while a lease ends and no server answers."""
    machine = Machine(server)
    machine.ask()  # in PART
    call = machine.sidecar.call(partition, server.run, server.now_ns)
    assert call is not None
    machine.sidecar.answered(partition, server.tick(*call), server.now_ns)
    calls = asked = 0
    while asked < 100:
        server.advance(max(machine.sidecar.next_call_ns(partition) - server.now_ns, 0))
        asked += 1
        if machine.sidecar.call(partition, server.run, server.now_ns) is not None:
            calls += 1
            machine.sidecar.failed(partition, server.now_ns)
    assert server.now_ns > START_NS + 2 * LEASE_MS * MS
    assert asked <= 2 * calls


# ---- servers that are new -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "least", "most"), [(10, 45, 100), (CALM_MAX * 2, 10, 20)])
def test_many_calm_news_are_told_less_often(server: Server, names: int, least: int, most: int) -> None:
    """So that they take a bounded part of the time; but once a second. In ten seconds."""
    machine, found = fill(server, names)
    pass_time(server, SECOND, machine)
    calls = 0
    for round_ in range(100):
        for name in found:
            if round_ % 20 < 10:
                machine.ask(name=name)
            else:
                machine.release(name=name)
        calls += pass_time(server, 100 * MS, machine)
    assert least <= calls <= most


def test_partitions_tell_their_calm_news_at_different_times() -> None:
    assert len({_calm_ns(partition, START_NS) for partition in range(authority.PARTITIONS)}) == authority.PARTITIONS
    for partition in range(authority.PARTITIONS):
        due_ns = _calm_ns(partition, START_NS)
        assert START_NS < due_ns <= START_NS + TICK_NS
        assert _calm_ns(partition, due_ns) == due_ns + TICK_NS, "each has its own times"


def new_server(server: Server) -> None:
    """Another process, which knows nothing."""
    server.data.clear()
    server.run = server.history = f"run{next(server.numbers)}"


def test_a_new_server_is_told_everything(server: Server) -> None:
    names = CALM_MAX * 2 + 10
    machine, found = fill(server, names)
    new_server(server)
    server.advance(MIN_GAP_NS)
    assert machine.turn()
    pass_time(server, 200 * MS, machine)
    assert machine.sidecar.figures(server.now_ns)["learning"] == 1
    totals = server.data[authority.keys(PART, "")[2].encode()]
    assert {*found} <= {*totals}
    assert pass_time(server, 50 * MS, machine) <= 1, "once"
    other = Machine(server)
    other.ask(name=found[0])
    other.turn()
    assert other.grants == []
    pass_time(server, 11 * SECOND, machine)
    assert machine.dropped == []
    assert machine.sidecar.figures(server.now_ns)["learning"] == 0


def test_a_new_server_is_told_everything_although_requests_are_asked_for_again_and_again(server: Server) -> None:
    """Also if it does not answer in between."""
    machine, found = fill(server, CALM_MAX * 4, maximum=1)
    machine.ask(maximum=1, name=found[-1], stays=True)
    new_server(server)
    for round_ in range(12):
        server.advance(101 * MS)
        call = machine.send()
        assert call is not None
        if round_ == 3:
            machine.sidecar.failed(PART, server.now_ns)
        else:
            machine.sidecar.answered(PART, server.tick(*call), server.now_ns)
    totals = server.data[authority.keys(PART, "")[2].encode()]
    assert {*found} == {*totals}


def test_a_server_that_has_forgotten_everything_is_told_everything(server: Server) -> None:
    """As after FLUSHALL, when its run is the same."""
    machine, found = fill(server, CALM_MAX * 2, maximum=1)
    for _ in range(2):
        pass_time(server, 3 * SECOND, machine)
        server.data.clear()
        pass_time(server, 1200 * MS, machine)
        totals = server.data[authority.keys(PART, "")[2].encode()]
        assert {*found} == {*totals}
    assert machine.dropped == []


@pytest.mark.parametrize("names", [10, CALM_MAX * 3])
@pytest.mark.parametrize("after_ms", [0, 3, 2500])
def test_a_server_that_forgets_everything_while_it_learns_is_told_it_again(
    server: Server, after_ms: int, names: int
) -> None:
    """As after FLUSHALL, several times. Meanwhile it gives nobody more."""
    machine, found = fill(server, names, maximum=1)
    for _ in range(6):
        server.data.clear()
        server.advance(3 * MS)
        while not machine.turn():
            server.advance(100 * MS)
        pass_time(server, after_ms * MS, machine)
    other = Machine(server)
    for _ in range(12):
        pass_time(server, SECOND, machine)
        for name in found[::100]:
            other.ask(maximum=1, name=name)
        other.turn()
    totals = server.data[authority.keys(PART, "")[2].encode()]
    assert {*found} == {*totals}
    assert (machine.dropped, other.grants) == ([], [])


def test_a_master_that_was_a_replica_for_a_moment_is_told_everything(server: Server) -> None:
    """Its process is the same, and it lacks what it had answered last."""
    before = server.snapshot()
    machine, found = fill(server, CALM_MAX * 2, maximum=1)
    server.restore(before)
    server.history = "another"
    other = Machine(server)
    other.ask(maximum=1, name=found[0])
    other.turn()
    assert other.refusals
    pass_time(server, 1200 * MS, machine)
    totals = server.data[authority.keys(PART, "")[2].encode()]
    assert {*found} == {*totals}
    assert machine.dropped == []


def test_a_lease_of_a_new_server_ends_with_its_learning_until_everything_is_told(server: Server) -> None:
    machine, _ = fill(server, CALM_MAX * 2)
    new_server(server)
    Machine(server).turn()
    server.advance(5 * SECOND)
    sent_ns = server.now_ns
    machine.turn()
    assert machine.store.until_ns[PART] == sent_ns + 4500 * MS
    pass_time(server, 20 * MS, machine)
    assert machine.store.until_ns[PART] > sent_ns + 9 * SECOND


def test_a_lease_is_given_up_if_a_new_server_cannot_be_told_everything(server: Server) -> None:
    """It would give to others what it does not know of."""
    machine, _ = fill(server, CALM_MAX * 2)
    new_server(server)
    server.advance(3 * MS)
    assert machine.turn()
    for _ in range(11):
        server.advance(SECOND)
        if machine.send() is not None:
            machine.sidecar.failed(PART, server.now_ns)
    assert machine.dropped


def test_nobody_yields_while_a_server_learns(server: Server) -> None:
    """What goes back would be of use to nobody. Afterwards those who wait elsewhere are served."""
    one, other = pair(server)
    for _ in range(2):
        one.ask(maximum=1, stays=True)
        one.turn()
    waiting = other.ask(maximum=1, stays=True)
    pass_time(server, 50 * MS, one, other)
    new_server(server)
    pass_time(server, 2 * SECOND, one, other)
    for _ in range(100):
        pass_time(server, 5 * MS, one, other)
        assert one.used == 1
        one.release()
        one.ask(maximum=1, stays=True)
    pass_time(server, 9 * SECOND, one, other)
    one.release()
    pass_time(server, 20 * MS, one, other)
    assert other.grants == [waiting]


def test_rights_stay_that_others_wait_for_while_a_server_learns(server: Server) -> None:
    """The answer to a call that says nothing of them tells that others wait."""
    one, other = pair(server)
    one.ask(maximum=1000)
    pass_time(server, SECOND, one, other)
    rights = one.rights
    assert rights > one.used
    new_server(server)
    pass_time(server, SECOND, one, other)
    other.ask(1000, maximum=1000, stays=True)
    pass_time(server, 3 * SECOND, one, other)
    assert one.rights == rights
    pass_time(server, 9 * SECOND, one, other)
    assert one.rights == one.used


def test_a_server_that_learns_does_not_know_all_sidecars(server: Server) -> None:
    machines = [Machine(server) for _ in range(3)]
    for machine in machines:
        machine.ask()
        machine.turn()
    pass_time(server, SECOND, *machines)
    new_server(server)
    pass_time(server, 100 * MS, machines[0])
    assert machines[0].store.sidecars == 3
    pass_time(server, 12 * SECOND, machines[0])
    assert machines[0].store.sidecars == 1


def test_idle_rights_stay_while_a_server_learns(server: Server) -> None:
    machine = Machine(server)
    machine.ask(80, maximum=1000)
    machine.turn()
    machine.release(79)
    before = machine.rights
    new_server(server)
    pass_time(server, 5 * SECOND, machine)
    assert machine.rights == before
    pass_time(server, 10 * SECOND, machine)
    assert machine.rights <= 3 + SPARE < before


# ---- rates ----------------------------------------------------------------------------------------------------------

YEARS_US = 316_224_000_000_000


def ask_rate(machine: Machine, first: int, units: int, taken: int, waiting: int = 0) -> tuple[list[Any], list[Any]]:
    """A call about a rate of which ten come in ten years. Returns what was given back, and what came."""
    machine.store.rates = [(1, b"r", 160, YEARS_US, 160, first, waiting or first, units, taken)]
    machine.store.given, machine.store.settled = [], []
    machine.server.advance(2 * TICK_NS)
    machine.turn()
    return machine.store.given, machine.store.settled


def test_units_of_a_rate_are_asked_for(server: Server) -> None:
    machine = Machine(server)
    assert ask_rate(machine, 5, 0, 0) == ([[]], [[(1, 5, 5, 0)]])
    assert ask_rate(machine, 5, 2, 0, waiting=9) == ([[]], [[(1, 7, 5, 0)]])
    assert ask_rate(machine, 3, 0, 7) == ([[]], [[(1, 10, 3, 0)]]), "and a stock, as so many were taken"
    assert ask_rate(machine, 3, 0, 99) == ([[]], [[(1, 3 + 160 // 8, 3, 0)]]), "but no more than that"
    ((_, units, least, wait_us),) = ask_rate(machine, 160, 0, 0)[1][0]
    assert (units, least) == (0, 160)
    assert wait_us > 0


def test_units_of_a_rate_go_back(server: Server) -> None:
    """If they are not taken. What was used without having been granted is told too."""
    machine = Machine(server)
    ask_rate(machine, 100, 0, 0)
    assert ask_rate(machine, 0, 10, 4)[0] == [[(1, 6)]]
    assert ask_rate(machine, 0, 4, 4) == ([], [[(1, 0, 0, 0)]]), "there is nothing to say"
    assert ask_rate(machine, 0, 4, 0)[0] == [[(1, 4)]]
    assert ask_rate(machine, 0, -7, 0)[0] == [[(1, -7)]]
    assert ask_rate(machine, 160, 0, 0)[1][0][0][1] == 0
    assert ask_rate(machine, 160 - 100 + 6 + 4 - 7, 0, 0)[1][0][0][1] == 63


def test_debts_of_a_rate_are_told_again(server: Server) -> None:
    """What was used beyond what was granted. What was given back is lost with the call."""
    machine = Machine(server)
    for units, given in ((-7, [[(1, -7)], [(1, 7)]]), (4, [[(1, 4)], []])):
        machine.store.rates, machine.store.given = [(1, b"r", 160, YEARS_US, 160, 0, 0, units, 0)], []
        assert machine.send() is not None
        machine.sidecar.failed(PART, server.now_ns)
        assert machine.store.given == given
        server.advance(SECOND)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures(server: Server) -> None:
    one, other = pair(server)
    one.ask(500, maximum=1000)
    one.turn()
    other.ask(100, maximum=1000)
    other.turn()
    figures = one.sidecar.figures(server.now_ns)
    assert figures["rights"] == one.rights
    assert figures["sidecars"] == 2
    assert (figures["overshoot"], figures["overshoot_max"], figures["failed"]) == (0, 0, 0)
    one.release(200)
    server.advance(SECOND)
    one.turn()
    assert one.sidecar.figures(server.now_ns)["stranded"] == one.rights - one.used > 0
    assert one.sidecar.figures(server.now_ns)["asked"] == 2


def test_figures_of_an_outage(server: Server) -> None:
    """Nobody calls the policy then."""
    machine = Machine(server)
    machine.ask()
    machine.turn()
    for seconds, age, lost in ((4, 4, 0), (5, 0, 1)):
        server.advance(seconds * SECOND)
        figures = machine.sidecar.figures(server.now_ns)
        assert (figures["lease_age"], figures["leases"], figures["lost"]) == (age, 1 - lost, lost)
    machine.turn()
    assert machine.sidecar.figures(server.now_ns)["lost"] == 1


def test_an_overshoot_is_told(server: Server) -> None:
    """Two have more together, as a server's clock was set forward while one was stopped."""
    one, other = Machine(server, drops=False), Machine(server)
    one.ask(60, maximum=100)
    one.turn()
    server.advance(20 * SECOND)
    other.ask(90, maximum=100)
    other.turn()
    pass_time(server, SECOND, one, other)
    assert one.sidecar.figures(server.now_ns)["overshoot"] == one.sidecar.figures(server.now_ns)["overshoot_max"] == 50
    other.release(60)
    pass_time(server, 3 * SECOND, one, other)
    assert one.sidecar.figures(server.now_ns)["overshoot"] == 0
    assert one.sidecar.figures(server.now_ns)["overshoot_max"] == 50
    assert 60 <= one.rights <= 60 + 100 // (8 * 2)
