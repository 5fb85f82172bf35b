"""Socket activation and systemd's watchdog. What is sent to systemd is tested in tests/functional."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from counterd.control.process import systemd
from counterd.control.process.systemd import notify, passed_sockets, watchdog_seconds


@pytest.fixture
def descriptors():
    """Copies of sockets, at numbers that follow each other."""
    first = 800
    used = []

    def place(*sockets: socket.socket) -> int:
        for number, one in enumerate(sockets, first):
            used.append(os.dup2(one.fileno(), number))
            one.close()
        return first

    yield place
    for number in used:
        with contextlib.suppress(OSError):  # its owner has closed it
            os.close(number)


def listening(family: int = socket.AF_INET, address: object = ("127.0.0.1", 0)) -> socket.socket:
    made = socket.socket(family)
    made.bind(address)
    made.listen()
    return made


def environ(count: int, names: str | None = None, pid: int | None = None) -> dict[str, str]:
    made = {"LISTEN_PID": str(pid or os.getpid()), "LISTEN_FDS": str(count), "OTHER": "x"}
    return made | ({} if names is None else {"LISTEN_FDNAMES": names})


def test_passed_sockets_have_names_and_addresses(descriptors, short_path):
    tcp, path = listening(), str(short_path / "s")
    port = tcp.getsockname()[1]
    first = descriptors(tcp, listening(socket.AF_UNIX, path), listening(socket.AF_UNIX, "\0" + path))
    env = environ(3, "counter.tcp:throttr")
    passed = passed_sockets(env, first)
    assert [(one.name, one.address) for one in passed] == [
        ("counter.tcp", ("127.0.0.1", port)),
        ("throttr", (path, -1)),
        ("", ("@" + path, -1)),
    ]
    assert [one.socket.fileno() for one in passed] == [first, first + 1, first + 2]
    assert not any(one.socket.get_inheritable() or one.socket.getblocking() for one in passed)
    assert env == {"OTHER": "x"}, "no child may think that they are its own"
    for one in passed:
        one.socket.close()


def test_sockets_for_another_process_are_ignored(descriptors):
    first = descriptors(listening())
    for env in (environ(1, pid=1), environ(0), {}, {"LISTEN_FDS": "1"}, environ(1) | {"LISTEN_FDS": "x"}):
        assert passed_sockets(env, first) == []
        assert env.keys() <= {"OTHER"}


@pytest.mark.parametrize("make", [socket.socket, lambda: socket.socket(type=socket.SOCK_DGRAM)])
def test_a_passed_socket_that_does_not_listen_is_an_error(descriptors, make):
    first = descriptors(make())
    with pytest.raises(OSError, match=f"descriptor {first} is not a listening stream socket"):
        passed_sockets(environ(1), first)


def test_a_passed_descriptor_that_is_no_socket_is_an_error():
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="Socket operation on non-socket"):
        passed_sockets(environ(1), reading)
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({"WATCHDOG_USEC": "9" * 400}, 0.0),
    ],
)
def test_the_watchdog_of_another_process_is_ignored(monkeypatch, env, seconds):
    monkeypatch.setattr(systemd.os, "environ", env)
    assert watchdog_seconds() == seconds


def test_notify_does_not_block_on_a_full_socket(monkeypatch, short_path):
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        manager.bind(str(short_path / "s"))
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.sendto(b"x", str(short_path / "s"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "s"))
        telling = threading.Thread(target=notify, args=("READY=1",), daemon=True)
        telling.start()
        telling.join(10)
        assert not telling.is_alive()


class Loop:
    """A loop whose timers are called by the test."""

    def __init__(self):
        self.timers = []

    def call_later(self, _delay, callback):
        self.timers.append(callback)
        return callback


def test_unsent_notifications_are_sent_later_in_order(monkeypatch, short_path):
    loop = Loop()
    teller = systemd.Teller(loop)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        manager.bind(str(short_path / "s"))
        manager.setblocking(False)
        sender.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "s"))
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.sendto(b"x", str(short_path / "s"))
        teller.tell("READY=1", "STATUS=s")
        teller.tell("RELOADING=1")
        for _ in range(3):
            (again,) = loop.timers
            loop.timers.clear()
            again()
        with contextlib.suppress(BlockingIOError):
            while True:
                assert manager.recv(99) == b"x"
        loop.timers.pop()()
        assert [manager.recv(99), manager.recv(99)] == [b"READY=1\nSTATUS=s", b"RELOADING=1"]
        assert not loop.timers
        for number in range(1000):
            teller.tell(f"READY={number}")
        assert len(loop.timers) == 1
        with contextlib.suppress(BlockingIOError):
            while True:
                manager.recv(99)
        loop.timers.pop()()
        assert manager.recv(99) == b"READY=984"  # of those that waited the last sixteen
