"""The address of a server, and a connection to it for requests before and after a load.

Floor 5 (ARCHITECTURE.md), pure Python.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from counterd.client._addresses import Address, Tls
from counterd.client._tls import secured
from counterd.errors import ProtocolError

if TYPE_CHECKING:
    import ssl

    from counterd.bench.options import Options

TRY_S = 5.0  # time limit for the first connection, which tests whether the server can be reached
ANSWER_S = 30.0
RECEIVE_SIZE = 1 << 18
SHOWN = 10  # how many findings are listed

T = TypeVar("T")


class Parser(Protocol[T]):
    """A parser of a protocol's wire module."""

    def feed(self, data: bytes, /) -> list[T]:
        """Returns the replies that are complete."""


class LoadError(Exception):
    """The load has no result: it never began, or one of its processes died."""


@dataclass(frozen=True)
class Place:
    """An address that accepts connections. context: the TLS context, or None."""

    family: int
    address: Any
    host: str
    context: ssl.SSLContext | None

    def connect(self) -> socket.socket:
        """Makes a connection. Raises OSError."""
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            connection.settimeout(ANSWER_S)
            connection.connect(self.address)
            if self.context is not None:
                return self.context.wrap_socket(connection, server_hostname=self.host)
        except OSError:
            connection.close()
            raise
        return connection

    def sockaddr(self) -> bytes:
        """Returns the address in the form of the kernel's struct sockaddr."""
        if self.family == socket.AF_UNIX:
            return struct.pack("=H", self.family) + os.fsencode(str(self.address)) + b"\0"
        host, port = self.address[:2]
        if self.family == socket.AF_INET:
            return struct.pack("=H", self.family) + struct.pack(">H", port) + socket.inet_aton(host) + bytes(8)
        flow, scope = self.address[2:]
        packed = socket.inet_pton(self.family, host.partition("%")[0])
        return struct.pack("=H", self.family) + struct.pack(">HI", port, flow) + packed + struct.pack("=I", scope)


def resolve(plan: Options) -> Place:
    """Returns the first of the server's addresses that accepts a connection. Raises LoadError if none does."""
    if plan.socket is not None:
        if len(os.fsencode(plan.socket)) > 107:
            raise LoadError(f"{plan.socket}: the path of a Unix socket can have at most 107 bytes")
        found: list[tuple[int, Any]] = [(socket.AF_UNIX, plan.socket)]
    else:
        try:
            infos = socket.getaddrinfo(plan.host, plan.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise LoadError(f"cannot connect to {plan.host}: {error.strerror or error}") from None
        found = [(info[0], info[4]) for info in infos]
    where = plan.socket or f"{plan.host}:{plan.port}"
    try:
        context = context_of(plan)
    except OSError as error:
        raise LoadError(f"cannot connect to {where}: {error}") from None
    for family, address in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(TRY_S)
                connection.connect(address)
                if context is not None:
                    secured(connection, context, plan.host, TRY_S).close()
        except OSError as error:
            failure = error
            continue
        return Place(family, address, plan.host, context)
    raise LoadError(f"cannot connect to {where}: {failure.strerror or failure}")


def context_of(plan: Options) -> ssl.SSLContext | None:
    """Returns the TLS context for a plan's connections; None without TLS. Raises OSError if a file cannot be used."""
    tls = Tls(plan.cacert or "", plan.cert or "", plan.key or "") if plan.tls else None
    return Address(plan.host, plan.port, tls=tls).make_context()


def asked(connection: socket.socket, requests: list[bytes], parser: Parser[T], why: str) -> list[T]:
    """Sends requests. Returns the replies in order. why: the purpose of the connection, for a ProtocolError."""
    answers: list[T] = []
    connection.sendall(b"".join(requests))
    while len(answers) < len(requests):
        data = connection.recv(RECEIVE_SIZE)
        if not data:
            raise ProtocolError(f"the server closed a connection that {why}")
        answers += parser.feed(data)
    return answers


def bounded(found: list[str]) -> list[str]:
    """Limits a list of findings: returns the first ones, and a line with the number of the others."""
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]
