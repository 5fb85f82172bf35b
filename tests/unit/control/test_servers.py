"""What servers tell about their cluster, and the search for the server of each partition. The servers are stand-ins."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot

from counterd.cluster.lease_protocol import LIBRARY, PARTITIONS, TAGS
from counterd.control import servers as module
from counterd.control.link import Link, LinkFailed, Login, Place, connect
from counterd.control.servers import PARTITION_OF_SLOT, Map, Role, Servers, check_state, read_map, read_role
from kit import cluster
from kit.redises import END, INFO, SILENCE, Refusal, Server, fleet, serving, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

OPEN = Login("", "", None)


# ---- what they say ----


def said(answers: dict[bytes, Any], read: Callable[[Link], Awaitable[Any]]) -> Any:
    """Asks a server that has these answers, by the first word of a command."""

    async def run() -> Any:
        async with serving(lambda words: {b"INFO": INFO, **answers}[words[0]]) as server:
            link = await connect(server.place, OPEN, lambda _: None)
            try:
                return await read(link)
            finally:
                link.cut("the end")

    return asyncio.run(run())


def test_the_map_of_a_cluster_is_read() -> None:
    here = [b"10.0.0.1", 6379, b"id"]
    ranges = [[0, 8191, here, [b"10.0.0.2", 6379, b"id"]], [8192, 16383, [b"", 6380, b"id"]]]
    found = said({b"CLUSTER": ranges}, read_map)
    first, second = Place("10.0.0.1", 6379), Place("127.0.0.1", 6380)
    assert list(found.places) == [first, Place("10.0.0.2", 6379), second]
    assert set(found.owners) == set(range(PARTITIONS))
    assert all(found.owners[number] == (first if slot < 8192 else second) for slot, number in PARTITION_OF_SLOT.items())


@pytest.mark.parametrize("masters", [2, 3, 4, 6, 8, 12, 16])
def test_masters_have_equal_numbers_of_partitions(masters: int) -> None:
    """If they have equal parts of the slots."""
    numbers = Counter(slot * masters // 16384 for slot in PARTITION_OF_SLOT)
    assert len(numbers) == masters
    assert max(numbers.values()) - min(numbers.values()) <= 1


def test_slots_without_a_server_have_no_owner() -> None:
    found = said({b"CLUSTER": []}, read_map)
    assert found == Map({}, [])


def test_a_server_without_cluster_mode_has_no_map() -> None:
    assert said({b"CLUSTER": Refusal("ERR This instance has cluster support disabled")}, read_map) is None


def test_an_error_instead_of_the_map_fails() -> None:
    with pytest.raises(LinkFailed, match="LOADING"):
        said({b"CLUSTER": Refusal("LOADING Redis is loading the dataset in memory")}, read_map)


@pytest.mark.parametrize(
    ("answer", "role"),
    [
        ([b"master", 42, [[b"10.0.0.2", b"6379", b"41"]]], Role(True, 1, 42, [Place("10.0.0.2", 6379)])),
        ([b"master", 0, []], Role(True, 0, 0, [])),
        ([b"slave", b"10.0.0.1", 6379, b"connected", 42], Role(False, 0, 0, [Place("10.0.0.1", 6379)])),
    ],
)
def test_roles_are_read(answer: Any, role: Role) -> None:
    assert said({b"ROLE": answer}, read_role) == role


@pytest.mark.parametrize("answer", [7, b"abc", [[b"0", 9, []]], [[0, 16383]], [[0, 16383, [7, 7]]], [7], None])
def test_an_invalid_map_fails(answer: Any) -> None:
    with pytest.raises(LinkFailed, match=r"^invalid reply to CLUSTER SLOTS: "):
        said({b"CLUSTER": answer}, read_map)


@pytest.mark.parametrize(
    "answer",
    [
        7,
        [],
        [b"sentinel", [b"a"]],
        [b"master"],
        [b"master", b"x", []],
        [b"master", 1, [[b"a", b"b", 1]]],
        [b"slave", b"a"],
        None,
    ],
)
def test_an_invalid_role_fails(answer: Any) -> None:
    with pytest.raises(LinkFailed, match=r"^invalid reply to ROLE: "):
        said({b"ROLE": answer}, read_role)


def test_an_invalid_cluster_state_fails() -> None:
    with pytest.raises(LinkFailed, match=r"^invalid reply to CLUSTER INFO: 7$"):
        said({b"CLUSTER": 7}, check_state)


@pytest.mark.needs("redis-server")
def test_a_real_server_has_the_functions_and_the_expected_slots(tmp_path: Path) -> None:
    """The partitions are in the slots in which the server has their keys."""

    async def run(place: Place) -> str:
        link = await connect(place, OPEN, lambda _: None)
        try:
            await link.identify()
            await link.prepare()
            assert (await read_role(link)).is_master
            assert await read_map(link) is None
            return link.run
        finally:
            link.cut("the end")

    with cluster.single(tmp_path) as servers:
        server = servers.masters[0]
        assert asyncio.run(run(Place("127.0.0.1", server.port))) == server.client.info("server")["run_id"]
        (found,) = server.client.function_list()
        assert found[1] == LIBRARY
    for slot, partition in PARTITION_OF_SLOT.items():
        assert key_slot(b"{%d}" % TAGS[partition]) == slot


# ---- the search ----


class Scene:
    """A search among servers, of which the first `known` are known from the start. whys: after each search, or ""."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, known: int = 1) -> None:
        monkeypatch.setattr(module, "RETRY_S", 0.01)
        self.fleet = [Server(f"run{number}") for number in range(count)]
        self.found: list[int] = []
        self.whys: list[str] = []
        self.bugs: list[Any] = []
        self._known = known
        self.servers: Servers

    def play(self, act: Callable[[], Awaitable[None]], arrange: Callable[[], None] = lambda: None) -> None:
        """Arranges the servers, searches and acts."""
        asyncio.run(self._play(act, arrange))
        assert self.bugs == []

    async def _play(self, act: Callable[[], Awaitable[None]], arrange: Callable[[], None]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: self.bugs.append(what))
        async with fleet(*self.fleet):
            arrange()
            seeds = [each.redis.place for each in self.fleet[: self._known]]
            self.servers = Servers(seeds, OPEN, self.found.append, self._searched)
            self.servers.start()
            try:
                await act()
            finally:
                self.servers.close()

    async def reached(self, *runs: str) -> None:
        """Waits until these have the partitions."""
        await until(lambda: {each.run if each else "" for each in self.servers.owners} == set(runs))

    def _searched(self) -> None:
        self.whys.append(self.servers.why if None in self.servers.owners else "")


def test_each_partition_has_its_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 3)

    async def act() -> None:
        await scene.reached("run0", "run1", "run2")
        for slot, partition in PARTITION_OF_SLOT.items():
            owner = scene.servers.owners[partition]
            assert owner is not None
            assert owner.run == f"run{slot * 3 // 16384}"

    scene.play(act)
    assert sorted(scene.found) == list(range(PARTITIONS))
    assert [each.redis.connections for each in scene.fleet] == [1, 1, 1]


def test_a_moved_partition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old server, which is asked first, knows the new one."""
    scene = Scene(monkeypatch, 2)
    first, second = scene.fleet

    async def act() -> None:
        await scene.reached("run0")
        await until(lambda: scene.whys)  # the search is over
        first.knows(second)
        scene.servers.refused(3, f"MOVED 1 127.0.0.1:{second.redis.place.port}")
        await scene.reached("run0", "run1")
        await until(lambda: len(scene.whys) == 2)

    scene.play(act, lambda: first.knows(first))
    assert scene.found[PARTITIONS:] == [3]
    assert scene.whys == ["", ""]


@pytest.mark.parametrize("answer", [Refusal("CLUSTERDOWN The cluster is down"), Refusal("READONLY"), END, SILENCE])
def test_a_failover_is_followed(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """The first server fails. The second knows nothing of that at first, and becomes the master."""
    monkeypatch.setattr("counterd.control.link.PATIENCE_S", 0.2)
    scene = Scene(monkeypatch, 2, known=2)
    first, second = scene.fleet

    async def act() -> None:
        await scene.reached("run0")
        first.answers |= dict.fromkeys((b"FUNCTION", b"INFO", b"CLUSTER"), answer)
        first.state = answer
        scene.servers.refused(3, "READONLY You can't write against a read only replica.")
        await until(lambda: any(scene.whys))
        second.knows(second)
        await scene.reached("run1")

    def arrange() -> None:
        second.knows(first)
        first.knows(first)

    scene.play(act, arrange)
    assert next(filter(None, scene.whys)).startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("error", "is_left"),
    [
        ("LOADING Redis is loading the dataset in memory", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("NOSCRIPT No matching script. Please use EVAL.", True),
        ("ERR Function not found", True),
        ("ERR Error running script (call to f_1): @user_script:63: @user_script: 63: -READONLY You can't write", True),
        ("ERR invalid expire time in 'set' command script: counterd_1, on @user_function:1.", False),
        ("TRYAGAIN Multiple keys request during rehashing of slot", False),
        ("ASK 3999 127.0.0.1:6381", False),
        ("ERR LOADING", False),
    ],
)
def test_errors_of_servers_and_of_calls(monkeypatch: pytest.MonkeyPatch, error: str, is_left: bool) -> None:
    scene = Scene(monkeypatch, 1)
    (server,) = scene.fleet

    async def act() -> None:
        await scene.reached("run0")
        assert scene.servers.refused(3, error) == (None if is_left else server.redis.place)
        assert scene.servers.refused(3, error) == (None if is_left else server.redis.place)
        assert (scene.servers.owners == [None] * PARTITIONS) == is_left
        await scene.reached("run0")

    scene.play(act)
    assert server.redis.connections == 1 + is_left


def test_the_search_survives_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer to a call cuts the connection on which the search waits for its own answer."""
    scene = Scene(monkeypatch, 1)

    async def act() -> None:
        await scene.reached("run0")
        link = scene.servers.owners[3]
        assert link is not None
        ask = link.ask

        async def ask_and_lose(*words: Any) -> Any:
            found = await ask(*words)
            if words == ("CLUSTER", "INFO"):
                link.cut("READONLY")
            return found

        monkeypatch.setattr(link, "ask", ask_and_lose)
        scene.servers.refused(3, "MOVED 1 127.0.0.1:1")
        await until(lambda: not link.is_open)
        await scene.reached("run0")
        assert link not in scene.servers.owners

    scene.play(act)


def test_a_server_whose_cluster_is_down_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which servers have the slots, but answers no calls."""
    scene = Scene(monkeypatch, 2)
    second = scene.fleet[1]
    second.state = b"cluster_state:fail\r\n"

    async def act() -> None:
        await until(lambda: any(scene.whys))
        assert {each.run if each else "" for each in scene.servers.owners} == {"run0", ""}
        second.state = b"cluster_state:ok\r\n"
        await scene.reached("run0", "run1")

    scene.play(act)
    assert "CLUSTERDOWN" in next(filter(None, scene.whys))


def test_a_replica_that_became_the_master_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old master still believes that it is one, but its replica has gone."""
    scene = Scene(monkeypatch, 3)
    first, second, third = scene.fleet

    async def act() -> None:
        await scene.reached("run0")
        second.is_master(third, offset=9)
        first.is_master(offset=10)
        first.redis.drop()
        await scene.reached("run1")

    def arrange() -> None:
        first.is_master(second, third)
        second.is_replica(first)
        third.is_replica(first)

    scene.play(act, arrange)


def test_the_master_of_a_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the replica is known from the start."""
    scene = Scene(monkeypatch, 2)
    replica, master = scene.fleet

    def arrange() -> None:
        replica.is_replica(master)
        master.is_master(replica)

    scene.play(lambda: scene.reached("run1"), arrange)


def test_unneeded_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 2)
    first, second = scene.fleet

    async def act() -> None:
        await scene.reached("run1")
        await until(lambda: not first.redis.peers)

    scene.play(act, lambda: first.knows(second))


@pytest.mark.parametrize("command", ["CLUSTER", "ROLE", "INFO"])
def test_a_server_with_invalid_answers_is_named_and_another_used(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    scene = Scene(monkeypatch, 2)
    odd, other = scene.fleet

    def arrange() -> None:
        odd.is_master()
        other.is_master(offset=9)
        odd.answers[command.encode()] = [7, None]

    async def act() -> None:
        await until(lambda: any(scene.whys))
        scene.servers._known.append(other.redis.place)
        await scene.reached("run1")

    scene.play(act, arrange)
    place = odd.redis.place
    why = next(filter(None, scene.whys))
    assert why.startswith(f"{place.host}:{place.port}: invalid reply to {command}")
    assert why.endswith(": [7, None]")


def test_an_exception_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, 1)

    async def act() -> None:
        await until(lambda: scene.bugs)
        scene.bugs.clear()
        monkeypatch.setattr(module, "read_map", read_map)
        await scene.reached("run0")

    async def broken(_: Link) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(module, "read_map", broken)
    scene.play(act)
