"""The sockets of a protocol with two ports: each has its own number and its own file; other settings concern both."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.control.config.keys import Listener, ports_of
from counterd.control.config.loading import ConfigError, load
from counterd.control.listeners import PortListeners
from counterd.control.process.systemd import Passed
from counterd.protocols.smockron import PROTOCOL
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SETTINGS = {
    "smockron.enable": "true",
    "smockron.bind": "127.0.0.1",
    "smockron.port": "0",
    "smockron.control_port": "0",
}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for sockets, as pytest's own directories have names too long for some."""
    with tempfile.TemporaryDirectory(prefix="counterd-") as name:
        yield Path(name)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """A stack that is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield stack


def listeners_of(
    directory: Path, stack: contextlib.ExitStack, passed: Sequence[Passed] = (), **settings: str
) -> tuple[PortListeners, PortListeners]:
    """The listeners of both ports, not opened yet. settings: without the name of the protocol."""
    file = directory / "F"
    file.write_text("".join(f"{key} = {value}\n" for key, value in SETTINGS.items()))
    config = load(file, [f"smockron.{key}={value}" for key, value in settings.items()], [PROTOCOL], passed)
    accounting, control = (PortListeners(port, config) for port in ports_of(PROTOCOL))
    stack.callback(control.stop)
    stack.callback(accounting.stop)
    return accounting, control


def listens(address: tuple[str, int] | str) -> bool:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(PATIENCE)
        return probe.connect_ex(address) == 0


def listening(stack: contextlib.ExitStack, address: tuple[str, int] | str) -> socket.socket:
    opened = stack.enter_context(socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET))
    opened.bind(address)
    opened.listen()
    return opened


def test_each_port_has_its_own_number(directory: Path, stack: contextlib.ExitStack) -> None:
    both = listeners_of(directory, stack)
    assert [listeners.port.name for listeners in both] == ["smockron", "smockron-control"]
    assert [listeners.open() for listeners in both] == [([], [])] * 2
    places = [listeners.tcp[0].getsockname() for listeners in both]
    assert places[0] != places[1]
    assert all(map(listens, places))
    assert [listeners.addresses() for listeners in both] == [[f"127.0.0.1:{number}"] for _, number in places]
    for listeners in both:
        listeners.stop()
        assert listeners.tcp[0].fileno() == -1


def test_addresses_share_a_port_chosen_by_the_kernel(directory: Path, stack: contextlib.ExitStack) -> None:
    listeners, _ = listeners_of(directory, stack, bind="127.0.0.1 127.0.0.2")
    assert listeners.open() == ([], [])
    hosts, numbers = zip(*(opened.getsockname() for opened in listeners.tcp), strict=True)
    assert hosts == ("127.0.0.1", "127.0.0.2")
    assert len(set(numbers)) == 1


def test_each_port_has_its_socket_file_with_the_shared_permissions(
    directory: Path, stack: contextlib.ExitStack
) -> None:
    paths = [str(directory / "accounting"), str(directory / "control")]
    files = dict(zip(("socket", "control_socket"), paths, strict=True))
    both = listeners_of(directory, stack, bind="", socket_mode="0600", socket_group=str(os.getegid()), **files)
    assert [listeners.open() for listeners in both] == [([], [])] * 2
    assert [listeners.addresses() for listeners in both] == [[f"unix:{path}"] for path in paths]
    assert all(map(listens, paths))
    for path in map(Path, paths):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for listeners in both:
        listeners.hand_over(os.geteuid(), os.getegid())
        listeners.stop()
    assert not any(Path(path).exists() for path in paths)


def test_an_address_in_use_is_reported_with_the_key_of_its_port(directory: Path, stack: contextlib.ExitStack) -> None:
    number = listening(stack, ("127.0.0.1", 0)).getsockname()[1]
    path = str(directory / "taken")
    listening(stack, path)
    listeners, control = listeners_of(directory, stack, control_port=str(number), control_socket=path)
    assert listeners.open() == ([], [])
    problems, missing = control.open()
    assert problems == [
        f"--set: smockron.control_port: cannot listen on 127.0.0.1:{number}: address already in use",
        f"--set: smockron.control_socket: cannot listen on {path}: another process listens on it",
    ]
    assert missing == []
    control.stop()
    assert listens(path), "it belongs to somebody else"


def test_passed_sockets_replace_configured_ones(directory: Path, stack: contextlib.ExitStack) -> None:
    """The files of passed Unix sockets are left to the process that opened them."""
    path = str(directory / "passed")
    tcp, unix = listening(stack, ("127.0.0.1", 0)), listening(stack, path)
    passed = [Passed(tcp, "smockron-control"), Passed(unix, "smockron-control.second")]
    listeners, control = listeners_of(directory, stack, passed, control_port="1", control_socket="/nowhere")
    assert listeners.open() == control.open() == ([], [])
    assert len(listeners.tcp) == 1
    assert control.tcp == [tcp]
    assert control.unix is None
    assert control.listening == [tcp, unix]
    assert control.addresses() == [f"127.0.0.1:{tcp.getsockname()[1]}", f"unix:{path}"]
    assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    control.hand_over(os.geteuid() + 1, -1)
    control.stop()
    assert Path(path).exists()


def test_a_passed_socket_without_a_name_is_matched_by_address(directory: Path, stack: contextlib.ExitStack) -> None:
    tcp = listening(stack, ("127.0.0.1", 0))
    number = tcp.getsockname()[1]
    _, control = listeners_of(directory, stack, [Passed(tcp, "")], control_port=str(number))
    assert control.open() == ([], [])
    assert control.tcp == [tcp]


def test_changed_keepalive_concerns_later_connections(directory: Path, stack: contextlib.ExitStack) -> None:
    listeners, _ = listeners_of(directory, stack, keepalive_idle="77")
    listeners.open()
    assert listeners.tcp[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
    ready: Any = SimpleNamespace(listener=Listener(keepalive_idle=88))
    listeners.apply(ready)
    assert listeners.tcp[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 88


@pytest.mark.parametrize(
    ("heard", "unheard", "key"),
    [("socket", "smockron-control", "control_socket"), ("control_socket", "smockron", "socket")],
)
def test_a_port_without_address_and_socket_is_a_mistake(
    directory: Path, stack: contextlib.ExitStack, heard: str, unheard: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        listeners_of(directory, stack, bind="", **{heard: "/a"})
    why = f"smockron.bind and smockron.{key} are both empty"
    assert caught.value.problems == (f"--set smockron.bind=: {unheard} is enabled but listens nowhere: {why}",)


def test_passed_ports_need_no_address(directory: Path, stack: contextlib.ExitStack) -> None:
    unix, tcp = listening(stack, str(directory / "passed")), listening(stack, ("127.0.0.1", 0))
    passed = [Passed(unix, "smockron"), Passed(tcp, "smockron-control")]
    listeners, control = listeners_of(directory, stack, passed)
    assert listeners.open() == control.open() == ([], [])
    assert (listeners.listening, control.listening) == ([unix], [tcp])
