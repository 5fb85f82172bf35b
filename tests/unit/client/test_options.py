"""The options of the clients' TCP sockets."""

from __future__ import annotations

import socket

import pytest

from counterd.client._connection import set_options


class Recorder:
    def __init__(self, host: str | None) -> None:
        self.host = host
        self.options: dict[tuple[int, int], int] = {}

    def getpeername(self) -> tuple[str, int]:
        if self.host is None:
            raise OSError("not connected")
        return self.host, 11215

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.options[level, name] = value


@pytest.mark.parametrize(
    ("host", "probed"),
    [("198.51.100.1", True), ("2001:db8::1", True), ("::12", True), (None, True), ("127.0.0.1", False), ("::1", False)],
)
def test_only_servers_elsewhere_are_probed(host: str | None, probed: bool) -> None:
    recorder = Recorder(host)
    set_options(recorder)  # type: ignore[arg-type]
    assert ((socket.SOL_SOCKET, socket.SO_KEEPALIVE) in recorder.options) == probed
    assert recorder.options[socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT] == 10_000
    assert recorder.options[socket.IPPROTO_TCP, socket.TCP_NODELAY] == 1
