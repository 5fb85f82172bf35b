"""Connections to Redis servers: answers in order, and failures, which fail all calls."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from counterd.cluster.lease_protocol import LIBRARY, library, script
from counterd.control import link as module
from counterd.control.link import MOST, Link, LinkFailed, Login, Place, connect
from counterd.control.resp_size_guard import Bounds
from kit.redises import END, INFO, RUN, SILENCE, Refusal, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OPEN = Login("", "", None)
UNKNOWN = Refusal("ERR unknown command 'FUNCTION', with args beginning with: 'LOAD'")
GARBAGE = bytearray(b"?\r\n")


class Scene:
    """A server with these answers, by the first word of a command, and a connection to it.

    asked: the commands so far. ended: why connections ended.
    """

    def __init__(self, answers: dict[bytes, Any], login: Login = OPEN, most: Bounds = MOST) -> None:
        self.answers = {b"INFO": INFO, **answers}
        self.login = login
        self.most = most
        self.asked: list[list[bytes]] = []
        self.ended: list[str] = []

    def answer(self, words: list[bytes]) -> Any:
        self.asked.append(words)
        return self.answers[words[0]]

    def play(self, act: Callable[[Link], Awaitable[Any]]) -> Any:
        """Connects, and returns what act() returns."""

        async def run() -> Any:
            async with serving(self.answer) as server:
                link = await connect(server.place, self.login, lambda link: self.ended.append(link.why), self.most)
                try:
                    return await act(link)
                finally:
                    link.cut("the end")

        return asyncio.run(run())


async def nothing(link: Link) -> None:
    """Only connects."""


async def identify(link: Link) -> str:
    await link.identify()
    return link.run


def test_a_connection_knows_the_run_id_of_the_server() -> None:
    scene = Scene({})
    assert scene.play(identify) == RUN
    assert scene.asked == [[b"INFO", b"server"]]
    assert scene.ended == ["the end"]


@pytest.mark.parametrize(
    ("login", "words"),
    [
        (Login("", "secret", None), [[b"AUTH", b"secret"]]),
        (Login("me", "secret", None), [[b"AUTH", b"me", b"secret"]]),
        (Login("me", "", None), [[b"AUTH", b"me", b""]]),
        (Login("", "secret", None, 3), [[b"AUTH", b"secret"], [b"SELECT", b"3"]]),
        (Login("", "", None, 3), [[b"SELECT", b"3"]]),
        (OPEN, []),
    ],
)
def test_a_connection_logs_in_first(login: Login, words: list[list[bytes]]) -> None:
    scene = Scene({b"AUTH": b"OK", b"SELECT": b"OK"}, login)
    scene.play(nothing)
    assert scene.asked == words


@pytest.mark.parametrize(
    ("answer", "says"),
    [(Refusal("ERR DB index is out of range"), "^ERR DB"), (7, "^invalid reply to SELECT: 7")],
)
def test_a_refused_database_fails_the_connection(answer: Any, says: str) -> None:
    with pytest.raises(LinkFailed, match=says):
        Scene({b"SELECT": answer}, Login("", "", None, 99)).play(nothing)


def test_a_refused_password_fails_the_connection() -> None:
    scene = Scene({b"AUTH": Refusal("WRONGPASS invalid")}, Login("", "secret", None))
    with pytest.raises(LinkFailed, match="WRONGPASS invalid"):
        scene.play(nothing)
    assert scene.ended == ["WRONGPASS invalid"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Refusal("ERR unknown command 'AUTH', with args beginning with: 'me' 'secret'"), r"with: 'me' '\*\*\*'$"),
        ([b"AUTH", b"me", b"secret"], "^invalid reply to AUTH$"),
    ],
)
def test_errors_do_not_show_the_password(answer: Any, says: str) -> None:
    scene = Scene({b"AUTH": answer}, Login("me", "secret", None))
    with pytest.raises(LinkFailed, match=says):
        scene.play(nothing)
    assert "secret" not in scene.ended[0]


def test_an_invalid_info_fails_the_connection() -> None:
    with pytest.raises(LinkFailed, match=r"^invalid reply to INFO: \[1, b'a'\]$"):
        Scene({b"INFO": [1, b"a"]}).play(identify)


def test_a_server_without_run_id_fails_the_connection() -> None:
    with pytest.raises(LinkFailed, match="does not tell its run_id"):
        Scene({b"INFO": b"# Server\r\n"}).play(identify)


def test_connecting_to_a_closed_port_fails() -> None:
    async def run() -> None:
        async with serving(lambda _: SILENCE) as server:
            place = server.place
        await connect(place, OPEN, lambda _: None)

    with pytest.raises(LinkFailed, match=r"refused|Connect call failed"):
        asyncio.run(run())


def test_calls_do_not_wait_for_answers_to_earlier_ones() -> None:
    async def ask_many(link: Link) -> list[Any]:
        return list(await asyncio.gather(*(link.ask("GET", number) for number in range(100))))

    scene = Scene({b"GET": 7})
    assert scene.play(ask_many) == [7] * 100
    assert scene.asked == [[b"GET", b"%d" % number] for number in range(100)]


@pytest.mark.parametrize(
    ("answer", "says"),
    [(END, "closed the connection"), (GARBAGE, "sent an invalid reply: "), (SILENCE, "no answer for 0.2 s")],
)
def test_a_failure_fails_all_calls(monkeypatch: pytest.MonkeyPatch, answer: Any, says: str) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)

    async def ask_two(link: Link) -> list[Any]:
        found = await asyncio.gather(link.ask("GET", 1), link.ask("GET", 2), return_exceptions=True)
        assert not link.is_open
        return found

    scene = Scene({b"GET": answer})
    found = scene.play(ask_two)
    (why,) = scene.ended
    assert [(type(each), str(each)) for each in found] == [(LinkFailed, why)] * 2
    assert why.startswith(says)


def test_errors_of_the_system_have_a_text() -> None:
    async def lose(link: Link) -> None:
        link.connection_lost(ConnectionResetError(104, "Connection reset by peer"))

    scene = Scene({})
    scene.play(lose)
    assert scene.ended == ["Connection reset by peer"]


def test_a_call_on_an_ended_connection_fails() -> None:
    """Not before send() has returned."""

    async def ask(link: Link) -> list[Any]:
        link.cut("READONLY")
        found: list[Any] = []
        link.send(found.append, "GET", 1)
        assert not found
        with pytest.raises(LinkFailed, match="READONLY"):
            await link.ask("GET", 1)
        return found

    (error,) = Scene({}).play(ask)
    assert (type(error), str(error)) == (LinkFailed, "READONLY")


def test_answers_after_a_cut_are_ignored() -> None:
    """One read brings two answers, and the caller of the second one cuts the connection."""

    async def ask(link: Link) -> None:
        asked = asyncio.ensure_future(link.ask("GET", 1))
        await asyncio.sleep(0)
        link.send(lambda _: link.cut("READONLY"), "GET", 2)
        link.data_received(b":1\r\n:2\r\n")
        with pytest.raises(LinkFailed, match="READONLY"):
            await asked

    Scene({b"GET": SILENCE}).play(ask)


@pytest.mark.parametrize("bytes_", [b":1\r\n", b"*1\r\n", b"$5\r\nab"])
@pytest.mark.parametrize("after", [b"", b":7\r\n"])
def test_unrequested_bytes_end_the_connection(bytes_: bytes, after: bytes) -> None:
    """They would be mistaken for the answer to the next call."""

    async def receive(link: Link) -> list[Any]:
        found: list[Any] = []
        if after:
            link.send(found.append, "GET", 1)
        link.data_received(after + bytes_)
        assert not link.is_open
        return found

    scene = Scene({b"GET": SILENCE})
    assert scene.play(receive) == ([7] if after else [])
    assert scene.ended == ["sent an unsolicited reply"]


def test_an_answer_that_is_too_large_ends_the_connection() -> None:
    """Answers before it do not count. The connection is cut as soon as the size is known."""

    async def receive(link: Link) -> list[Any]:
        found: list[Any] = []
        for _ in range(10):
            link.send(found.append, "GET", 1)
            link.data_received(b"$900\r\n" + b"a" * 900 + b"\r\n")
        link.send(found.append, "GET", 1)
        link.data_received(b"$995\r\n")
        return found

    scene = Scene({b"GET": SILENCE}, most=Bounds(1000, 10))
    assert [type(each) for each in scene.play(receive)] == [bytes] * 10 + [LinkFailed]
    assert scene.ended == ["sent an invalid reply: more than 1000 bytes"]


def test_an_array_that_is_too_large_ends_the_connection() -> None:
    """No memory is reserved for it."""

    async def receive(link: Link) -> list[Any]:
        found: list[Any] = []
        link.send(found.append, "GET", 1)
        link.data_received(b"*2147483647\r\n")
        return found

    scene = Scene({b"GET": SILENCE})
    assert [type(each) for each in scene.play(receive)] == [LinkFailed]
    assert scene.ended == [f"sent an invalid reply: more than {MOST.elements:,} elements"]


def test_the_map_of_a_cluster_can_be_larger_than_other_answers() -> None:
    large = [[0, 16383, [b"127.0.0.1", 1]]] * 5000

    async def ask(link: Link) -> None:
        assert await link.ask_for_slots() == large
        with pytest.raises(LinkFailed, match="more than 16,384 elements"):
            await link.ask("ROLE")

    Scene({b"CLUSTER": large, b"ROLE": large}).play(ask)


def test_a_large_answer_pauses_reading_for_other_work() -> None:
    """After each read, other work of the loop has its turn. uvloop would read 32 times."""

    async def receive(link: Link) -> list[str]:
        done: list[str] = []
        link.send(lambda _: done.append("answer"), "GET", 1)
        link._transport.pause_reading = lambda: done.append("pause")  # type: ignore[method-assign]
        link._transport.resume_reading = lambda: done.append("resume")  # type: ignore[method-assign]
        link.data_received(b"$100000\r\n" + b"x" * 50_000)
        asyncio.get_running_loop().call_soon(done.append, "others")
        await asyncio.sleep(0)
        link.data_received(b"x" * 50_000 + b"\r\n")
        link.cut("the end")
        await asyncio.sleep(0)
        return done

    assert Scene({b"GET": SILENCE}).play(receive) == ["pause", "resume", "others", "pause", "answer"]


def test_a_line_without_an_end_ends_the_connection() -> None:
    """It is not kept, as each read would search it for its end from the beginning."""

    async def receive(link: Link) -> list[Any]:
        found: list[Any] = []
        link.send(found.append, "GET", 1)
        link.data_received(b"+" + b"x" * 5000)
        return found

    scene = Scene({b"GET": SILENCE})
    assert [type(each) for each in scene.play(receive)] == [LinkFailed]
    assert scene.ended == ["sent an invalid reply: a line of more than 4096 bytes"]


@pytest.mark.parametrize("place", [Place("a..b", 1), Place("a" * 64, 1), Place("a\0b", 1), Place("127.0.0.1", 1 << 40)])
def test_an_invalid_host_or_port_fails(place: Place) -> None:
    with pytest.raises(LinkFailed):
        asyncio.run(connect(place, OPEN, lambda _: None))


def test_a_connection_that_ends_while_it_is_made_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async def closed(*_: Any, **__: Any) -> None:
            raise RuntimeError("the handler is closed")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", closed)
        await connect(Place("127.0.0.1", 1), OPEN, lambda _: None)

    with pytest.raises(LinkFailed, match="the handler is closed"):
        asyncio.run(run())


def test_each_answer_has_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late answer leaves the next one all of its time."""
    monkeypatch.setattr(module, "PATIENCE_S", 3600)

    async def look(link: Link) -> bool:
        asked = asyncio.ensure_future(link.ask("GET", 1))
        await asyncio.sleep(0)
        link._look()
        await asked
        link._look()
        return link.is_open

    assert Scene({b"GET": 1}).play(look)


@pytest.mark.parametrize("answer", [b"counterd_1", Refusal("ERR Library 'counterd_1' already exists")])
def test_a_server_with_the_functions_is_prepared(answer: Any) -> None:
    async def prepare(link: Link) -> tuple[str, str]:
        await link.prepare()
        return link.command

    scene = Scene({b"FUNCTION": answer})
    assert scene.play(prepare) == ("FCALL", LIBRARY)
    assert scene.asked == [[b"FUNCTION", b"LOAD", library()]]


def test_a_server_without_functions_gets_the_script() -> None:
    digest = hashlib.sha1(script()).hexdigest()

    async def prepare(link: Link) -> tuple[str, str]:
        await link.prepare()
        return link.command

    scene = Scene({b"FUNCTION": UNKNOWN, b"SCRIPT": digest.encode()})
    assert scene.play(prepare) == ("EVALSHA", digest)
    assert scene.asked[1:] == [[b"SCRIPT", b"LOAD", script()]]


@pytest.mark.parametrize("digest", [7, b"0123", [b"a" * 40]])
def test_a_server_with_invalid_answers_about_scripts(digest: Any) -> None:
    with pytest.raises(LinkFailed, match=r"^invalid reply to SCRIPT LOAD: "):
        Scene({b"FUNCTION": UNKNOWN, b"SCRIPT": digest}).play(Link.prepare)


def test_a_replica_cannot_be_prepared() -> None:
    with pytest.raises(LinkFailed, match="READONLY"):
        Scene({b"FUNCTION": Refusal("READONLY You can't write against a read only replica.")}).play(Link.prepare)
