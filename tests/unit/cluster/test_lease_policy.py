"""The policy of daemons, with a store and a Redis in memory, and a clock that the tests set.

tests/simulation/test_shared.py checks what is promised about limits and waiting. These tests check the rest: what
is sent when, failed calls, new servers while there are many names, rates, and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd.cluster import lease_protocol
from counterd.cluster.lease_policy import (
    CHANGES_MAX,
    MS,
    PRESENCE,
    RETRY_MOST_NS,
    SECOND,
    TRANSITIONS,
    Partition,
    State,
)
from counterd.contract import RateChange
from kit import shared_store
from kit.leasing import LEASE_MS, NAME, PART, START_NS, Machine, Server, fill, pair, pass_time

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE_NS = LEASE_MS * MS
SOON_NS = 20 * MS
TOTALS = lease_protocol.keys(PART, "")[2].encode()


@pytest.fixture
def server() -> Server:
    return Server()


def reported(server: Server) -> set[bytes]:
    """The names that the server knows."""
    return {*server.data.get(TOTALS, {})}


def is_granted(machine: Machine, amount: int, maximum: int, name: bytes = NAME) -> bool:
    """Whether a request that does not wait is granted, with a call if it needs one."""
    request = machine.ask(amount, maximum, name=name)
    machine.turn()
    return request in machine.grants


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_rights_are_requested_in_advance_and_go_back_when_idle(server: Server) -> None:
    one, other = pair(server)
    for _ in range(300):
        is_granted(one, 1, 1000)
        server.advance(3 * MS)
    assert pass_time(server, 100 * MS, one) <= 2
    rights = one.rights
    for _ in range(rights - 300):
        assert one.ask(maximum=1000) in one.grants, "without a call"
    one.release(rights - 10)
    pass_time(server, 2 * SECOND, one)
    assert 10 <= one.rights < 30
    assert is_granted(other, 970, 1000)


@pytest.mark.parametrize(("first", "second"), [(3, 3), (100, 5)], ids=["a small limit", "another maximum"])
def test_exact_rights_serve_no_other_request(server: Server, first: int, second: int) -> None:
    """With few permits, or if requests for a name have several maximums."""
    machine, _ = pair(server)
    assert is_granted(machine, 1, first)
    server.advance(3 * MS)
    assert is_granted(machine, 1, second)
    machine.release(2)
    assert machine.rights == 0
    assert machine.ask(maximum=second) not in machine.grants


def test_rights_that_others_wait_for_go_to_them(server: Server) -> None:
    """Idle rights soon, and freed ones at once."""
    one, other = pair(server)
    assert is_granted(one, 999, 1000)
    waiting = [other.ask(maximum=1000, stays=True) for _ in range(2)]
    pass_time(server, 1200 * MS, one, other)
    assert other.grants == waiting[:1]
    one.release()
    pass_time(server, SOON_NS, one, other)
    assert other.grants == waiting


def test_figures_of_refusals(server: Server) -> None:
    one, other = pair(server)
    is_granted(one, 1000, 1000)
    one.release(900)
    server.advance(101 * MS)
    one.turn()
    assert not is_granted(other, 900, 1000), "although permits are free"
    server.advance(3 * MS)
    assert not is_granted(other, 901, 1000)
    figures = other.policy.figures(server.now_ns)
    assert (figures["refused"], figures["refused_in_vain"]) == (2, 1)


# ---- when a call is made ---------------------------------------------------------------------------------------------


def test_few_calls_are_made_while_nothing_changes(server: Server) -> None:
    machine = Machine(server)
    assert machine.turn(), "so that a new server begins to recover"
    assert pass_time(server, 10 * SECOND, machine) == 0
    is_granted(machine, 1, 1000)
    assert pass_time(server, 10 * SECOND, machine) <= 12, "about once a second, to hear whether others wait"
    assert machine.dropped == []
    machine.release()
    pass_time(server, 2 * LEASE_NS, machine)
    figures = machine.policy.figures(server.now_ns)
    assert (figures["leases"], figures["lost"], machine.dropped) == (0, 0, [])
    assert is_granted(machine, 1, 1000)


@pytest.mark.parametrize("partition", [PART, PRESENCE], ids=["in use", "only a lease"])
def test_a_due_call_is_not_empty(server: Server, partition: int) -> None:
    """Or the daemon would check again and again. Also while a lease ends and no server answers."""
    machine = Machine(server)
    machine.ask()  # in PART
    call = machine.policy.call(partition, server.run, server.now_ns)
    assert call is not None
    machine.policy.answered(partition, server.tick(*call), server.now_ns)
    calls = 0
    for _ in range(100):
        server.advance(max(machine.policy.next_call_ns(partition) - server.now_ns, 0))
        if machine.policy.call(partition, server.run, server.now_ns) is not None:
            calls += 1
            machine.policy.failed(partition, server.now_ns)
    assert server.now_ns > START_NS + 2 * LEASE_NS
    assert calls >= 50


@pytest.mark.parametrize(("names", "least", "most"), [(10, 45, 100), (CHANGES_MAX * 2, 10, 20)])
def test_many_changes_are_sent_less_often(server: Server, names: int, least: int, most: int) -> None:
    """So that they use a bounded part of the time; but once a second. In ten seconds."""
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


def test_the_size_of_a_call_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that do not fit follow soon, also to a new server."""
    monkeypatch.setattr(shared_store, "CHANGES_BYTES_MAX", 4500)
    sizes, plain = [], server.tick

    def tick(keys: list[str], arguments: list[Any]) -> Any:
        sizes.append(sum(len(each) for each in arguments if isinstance(each, bytes)))
        return plain(keys, arguments)

    monkeypatch.setattr(server, "tick", tick)
    machine, found = fill(server, 50, size=1000)
    forget(server)
    pass_time(server, 1300 * MS, machine)
    assert reported(server) == {*found}
    assert max(sizes) < 2 * 5 * (1010 + 60), "urgent and other ones, each a name and numbers"


# ---- leases and calls that fail --------------------------------------------------------------------------------------


def test_an_expired_lease_is_lost_once(server: Server) -> None:
    machine = Machine(server)
    is_granted(machine, 1, 100)
    server.advance(4 * SECOND)
    assert machine.policy.figures(server.now_ns)["lease_age"] == 4
    server.advance(LEASE_NS - 4 * SECOND - 1)
    assert machine.policy.figures(server.now_ns)["lost"] == 1, "although nobody calls the policy"
    assert machine.ask() not in machine.grants
    machine.turn()
    assert (machine.dropped, len(machine.grants)) == ([NAME], 2)
    assert machine.policy.figures(server.now_ns)["lost"] == 1


def test_a_revoked_lease_is_followed_by_one_with_another_name(server: Server) -> None:
    machine = Machine(server, drops=False)
    is_granted(machine, 5, 100)
    server.data[lease_protocol.keys(PART, "")[0].encode()][b"s1"] = 1.0
    server.advance(3 * MS)
    assert not is_granted(machine, 13, 100)
    assert machine.rights == 0
    server.advance(3 * MS)
    keys, arguments = machine.send() or ([], [])
    assert (keys[-1].rpartition(":")[2], *arguments[:2]) == ("s2", "s2", 1)
    machine.policy.answered(PART, server.tick(keys, arguments), server.now_ns)
    pass_time(server, 500 * MS, machine)
    assert machine.rights >= machine.used == 18, "also for what was kept"


def test_release_all_gives_everything_back(server: Server) -> None:
    one, other = pair(server)
    is_granted(one, 99, 100)
    one.ask(2, maximum=100)
    server.advance(3 * MS)
    call = one.send()
    assert call is not None
    found = server.tick(*call)
    until_ns = one.store.until_ns[PART]
    server.tick(*one.policy.release_all(PART))
    one.policy.answered(PART, found, server.now_ns)
    one.policy.failed(PART, server.now_ns)
    assert (one.store.until_ns[PART], one.store.reachable[PART]) == (until_ns, True), "no answer counts any more"
    assert is_granted(other, 100, 100)


def test_unanswered_calls_are_repeated_with_growing_pauses(server: Server) -> None:
    machine = Machine(server)
    machine.ask(stays=True)
    waits = []
    for _ in range(6):
        assert machine.send() is not None
        machine.policy.failed(PART, server.now_ns)
        assert not machine.store.reachable[PART]
        assert machine.send() is None
        waits.append(machine.policy.next_call_ns(PART) - server.now_ns)
        server.advance(waits[-1])
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] == RETRY_MOST_NS
    assert machine.turn()
    assert machine.store.reachable[PART]
    server.advance(3 * MS)
    assert machine.turn()
    assert len(machine.grants) == 1


@pytest.mark.parametrize("is_repeated", [False, True], ids=["no answer", "repeated by a library"])
def test_rights_of_a_lost_answer_go_back(server: Server, is_repeated: bool) -> None:
    one, other = pair(server)
    is_granted(one, 10, 100)
    pass_time(server, SECOND, one)
    request = one.ask(60, maximum=100, stays=True)
    call = one.send()
    assert call is not None
    server.tick(*call)
    one.store.give_up(request)
    if is_repeated:
        one.policy.answered(PART, server.tick(*call), server.now_ns)
    else:
        one.policy.failed(PART, server.now_ns)
    pass_time(server, 2 * SECOND, one)
    assert (one.used, is_granted(other, 80, 100)) == (10, True)


def test_an_invalid_answer_is_a_failure(server: Server) -> None:
    machine = Machine(server)
    for answer in ([2, 0, 9, 1, 5, [], b"", b""], [2, 0, 9, 1, 5, [], b"x", b""], [2, 0], [], None):
        machine.ask(stays=True)
        assert machine.send() is not None
        with pytest.raises(ValueError, match="the authority answered"):
            machine.policy.answered(PART, answer, server.now_ns)
        assert not machine.store.reachable[PART]
        server.advance(SECOND)


# ---- servers that do not know everything -----------------------------------------------------------------------------


def test_states_change_as_in_the_documented_table() -> None:
    assert {*TRANSITIONS} == {*State}
    for state, followers in TRANSITIONS.items():
        for following in State:
            if following == state or following in followers:
                Partition(PART, state).become(following)
            else:
                with pytest.raises(AssertionError):
                    Partition(PART, state).become(following)


def forget(server: Server) -> None:
    """Makes the server forget everything, as FLUSHALL does; its run stays the same."""
    server.restore(({}, {}))


def replace(server: Server) -> None:
    """Replaces the server with another process, which knows nothing."""
    server.restore(({}, {}))
    server.run = server.history = f"run{next(server.numbers)}"


def be_a_replica(server: Server) -> None:
    """Makes the server a replica for a moment. Its process is the same, but some answered changes are lost."""
    server.restore(({}, {}))
    server.history = f"history{next(server.numbers)}"


@pytest.mark.parametrize("change", [forget, replace, be_a_replica])
@pytest.mark.parametrize("names", [10, CHANGES_MAX * 2, CHANGES_MAX * 2 + 10])
def test_a_server_that_has_lost_data_gets_a_full_report(
    server: Server, names: int, change: Callable[[Server], None]
) -> None:
    machine, found = fill(server, names)
    for _ in range(2):
        change(server)
        pass_time(server, 1500 * MS, machine)
        assert reported(server) == {*found}
        assert pass_time(server, 100 * MS, machine) <= 2, "once"
        assert machine.policy.figures(server.now_ns)["learning"] == 1
        assert not is_granted(Machine(server), 1, 100, found[0])
    pass_time(server, 11 * SECOND, machine)
    assert machine.dropped == []
    assert machine.policy.figures(server.now_ns)["learning"] == 0


@pytest.mark.parametrize("after_ms", [0, 3, 2500])
def test_a_server_that_keeps_losing_data_gets_a_full_report_each_time(server: Server, after_ms: int) -> None:
    """Meanwhile it grants the daemon nothing more."""
    machine, found = fill(server, CHANGES_MAX * 3, maximum=1)
    for _ in range(6):
        forget(server)
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
    assert reported(server) == {*found}
    assert (machine.dropped, other.grants) == ([], [])


def test_a_full_report_goes_on_while_requests_wait_and_calls_fail(server: Server) -> None:
    machine, found = fill(server, CHANGES_MAX * 4, maximum=1)
    machine.ask(maximum=1, name=found[-1], stays=True)
    replace(server)
    for round_ in range(12):
        server.advance(101 * MS)
        call = machine.send()
        assert call is not None
        if round_ == 3:
            machine.policy.failed(PART, server.now_ns)
        else:
            machine.policy.answered(PART, server.tick(*call), server.now_ns)
    assert reported(server) == {*found}


def test_a_lease_ends_if_a_new_server_gets_no_full_report_in_time(server: Server) -> None:
    """The server would grant to others what it does not know about."""
    machine, _ = fill(server, CHANGES_MAX * 2 + 10)
    replace(server)
    Machine(server).turn()
    server.advance(5 * SECOND)
    assert machine.turn()
    assert machine.store.until_ns[PART] < server.now_ns + 5 * SECOND, "before the server gives again"
    for _ in range(11):
        server.advance(SECOND)
        if machine.send() is not None:
            machine.policy.failed(PART, server.now_ns)
    assert machine.dropped


def test_nothing_goes_back_while_a_server_recovers(server: Server) -> None:
    """It would serve no other daemon. Afterwards requests that wait elsewhere are served."""
    one, other = pair(server)
    is_granted(one, 80, 1000)
    one.release(79)
    rights = one.rights
    replace(server)
    pass_time(server, SECOND, one, other)
    waiting = other.ask(1000 - 8, maximum=1000, stays=True)
    pass_time(server, 8 * SECOND, one, other)
    assert one.rights == rights
    assert one.ask(maximum=1000) in one.grants
    pass_time(server, 4 * SECOND, one, other)
    assert other.grants == [waiting]


def test_a_server_that_recovers_does_not_know_all_daemons(server: Server) -> None:
    machines = [Machine(server) for _ in range(3)]
    for machine in machines:
        is_granted(machine, 1, 100)
    pass_time(server, SECOND, *machines)
    replace(server)
    pass_time(server, 100 * MS, machines[0])
    assert machines[0].store.daemons == 3
    pass_time(server, 12 * SECOND, machines[0])
    assert machines[0].store.daemons == 1


# ---- rates -----------------------------------------------------------------------------------------------------------

YEARS_US = 316_224_000_000_000
BURST = 160


class Rate:
    """A rate of which ten units come in ten years, in the store of a machine."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.machine = Machine(server)

    def ask(self, first: int, units: int, taken: int, *, waiting: int = 0, fails: bool = False) -> tuple[int, int]:
        """Returns the units that are kept until the answer, and those that it brings. Adds the time until then."""
        store = self.machine.store
        store.rates = [RateChange(1, b"r", BURST, YEARS_US, BURST, first, waiting or first, units, taken)]
        store.updates.clear()
        self.server.advance(SECOND)
        call = self.machine.send()
        if call is not None and fails:
            self.machine.policy.failed(PART, self.server.now_ns)
        elif call is not None:
            self.machine.policy.answered(PART, self.server.tick(*call), self.server.now_ns)
        kept = next((amount for update in store.updates for _, amount, _ in update.kept), units)
        return kept, sum(rate.units for update in store.updates for rate in update.rates)


def test_units_of_a_rate_are_requested(server: Server) -> None:
    rate = Rate(server)
    assert rate.ask(5, 0, 0) == (0, 5)
    assert rate.ask(5, 2, 0, waiting=9) == (2, 7)
    assert rate.ask(3, 0, 7) == (0, 10), "and a stock, as so many were taken"
    assert rate.ask(3, 0, 99) == (0, 3 + BURST // 8), "but no more than that"
    assert rate.ask(BURST, 0, 0) == (0, 0)
    assert rate.machine.store.updates[-1].rates[0].wait_us > 0


def test_unused_units_of_a_rate_go_back(server: Server) -> None:
    """Units used without a grant are reported too, and again if the call fails."""
    rate = Rate(server)
    rate.ask(100, 0, 0)
    assert rate.ask(0, 10, 4) == (4, 0)
    assert rate.ask(0, 4, 4) == (4, 0)
    assert rate.machine.store.updates[0].unchanged == [1], "there is nothing to say"
    assert rate.ask(0, 4, 0) == (0, 0)
    assert rate.ask(0, -7, 0, fails=True) == (-7, 0)
    assert rate.ask(0, -7, 0) == (-7, 7)
    assert rate.ask(BURST - 100 + 6 + 4 - 7 + 1, 0, 0) == (0, 0)
    assert rate.ask(BURST - 100 + 6 + 4 - 7, 0, 0) == (0, 63)


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures_of_the_policy(server: Server) -> None:
    one, other = pair(server)
    is_granted(one, 500, 1000)
    is_granted(other, 100, 1000)
    figures = one.policy.figures(server.now_ns)
    assert (figures["rights"], figures["sidecars"], figures["asked"], figures["failed"]) == (one.rights, 2, 2, 0)
    one.release(200)
    server.advance(SECOND)
    one.turn()
    assert one.policy.figures(server.now_ns)["stranded"] == one.rights - one.used > 0


def test_an_overshoot_is_reported(server: Server) -> None:
    """Two daemons have more together, as a server's clock was set forward while one was stopped."""
    one, other = Machine(server, drops=False), Machine(server)
    is_granted(one, 60, 100)
    server.advance(2 * LEASE_NS)
    assert is_granted(other, 90, 100)
    for overshoot in (50, 0):
        pass_time(server, 3 * SECOND, one, other)
        figures = one.policy.figures(server.now_ns)
        assert (figures["overshoot"], figures["overshoot_max"]) == (overshoot, 50)
        other.release(60 if overshoot else 0)
