"""What the commands of counterctl share: where the server is, names, times, and how errors end.

Floor 5. Nothing here imports a client before it is needed: completion asks for the commands' names only.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import click

from counterd.cli.reading import ParamType, Reads, at_least
from counterd.errors import (
    ConnectionLost,
    CounterdError,
    InvalidArguments,
    ProtocolError,
    ServerError,
    Timeout,
)
from counterd.units import printable, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client import Client

EXIT_NOT_AVAILABLE = 1
EXIT_USAGE = 2
EXIT_NO_CONNECTION = 3
EXIT_SIGNAL = 128  # and the signal's number, as shells say it

NAME_MAX = 65_535  # bytes
TIMEOUT = 5.0  # seconds

F = TypeVar("F", bound="Callable[..., Any]")


class Address(NamedTuple):
    """Where a server is: host and port, or the Unix socket at path."""

    host: str
    port: int
    path: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.path is None else self.path

    @classmethod
    def read(cls, text: str, scheme: str, port: int) -> Address:
        """scheme://host:port or scheme+unix:///path; without a port, this one."""
        wrong = ValueError(f"expected {scheme}://host:port or {scheme}+unix:///path, not {text!r}")
        try:
            parts = urlsplit(text)
            given = parts.port
        except ValueError:
            raise wrong from None
        if parts.query or parts.fragment or parts.username is not None or given == 0:
            raise wrong
        if parts.scheme == f"{scheme}+unix" and not parts.netloc and parts.path.startswith("/"):
            return cls("", 0, unquote(parts.path))
        if parts.scheme == scheme and parts.hostname and parts.path in ("", "/"):
            return cls(parts.hostname, port if given is None else given)
        raise wrong


class Server:
    """A server as the options name it, not connected yet."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout

    @property
    def arguments(self) -> dict[str, Any]:
        """What every client is made with: `Client(**server.arguments)`."""
        host, port, path = self.address
        return {"path": path, "timeout": self.timeout} | ({"host": host, "port": port} if path is None else {})


class Target(Server):
    """The server of the counters."""

    def connect(self, **options: Any) -> Client:
        """A client that is connected to it; options are the client's, and go over those of the command line."""
        from counterd.client import Client

        return Client(**{**self.arguments, **options})


pass_target = click.make_pass_decorator(Target)


def address_options(scheme: str, port: int, variable: str) -> Callable[[F], F]:
    """--url, --host, --port, --socket and --timeout; of them the callback makes an Address with chosen_address()."""

    def read(text: str) -> Address:
        return Address.read(text, scheme, port)

    def decorate(function: F) -> F:
        for option in (
            click.option(
                "--timeout", type=TIME_LIMIT, default=TIMEOUT, help="How long an answer may take.  [default: 5s]"
            ),
            click.option("-s", "--socket", metavar="PATH", help="Its Unix socket."),
            click.option(
                "-p", "--port", type=click.IntRange(1, 65535), metavar="PORT", help=f"Its port.  [default: {port}]"
            ),
            click.option("-h", "--host", help="The server's host.  [default: 127.0.0.1]"),
            click.option(
                "-u",
                "--url",
                type=Reads("url", read),
                envvar=variable,
                show_envvar=True,
                help=f"The server: {scheme}://host:port or {scheme}+unix:///path.",
            ),
        ):
            function = option(function)
        return function

    return decorate


def chosen_address(context: click.Context, port: int) -> Address:
    """What the options of address_options() say; the command line goes before the environment."""
    options = context.params
    url, host, path = options["url"], options["host"], options["socket"]
    over_tcp = host is not None or options["port"] is not None
    by_url = context.get_parameter_source("url") is click.core.ParameterSource.COMMANDLINE
    if by_url + over_tcp + (path is not None) > 1:
        raise click.UsageError("a server is at a --url, or a --host and --port, or a --socket")
    if path is not None:
        return Address("", 0, path)
    if over_tcp or url is None:
        return Address(host or "127.0.0.1", options["port"] or port)
    address: Address = url
    return address


# ---- values of the command line ----

DURATION = Reads("duration", seconds)
TIME_LIMIT = Reads("duration", at_least(0.001, seconds))


class NameType(ParamType):
    """A name as the bytes of the command line, whatever the locale makes of them."""

    name = "name"

    def __init__(self, most: int = NAME_MAX, least: int = 1) -> None:
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        name = os.fsencode(value)
        if not self._least <= len(name) <= self._most:
            self.fail(f"a name has {self._least} to {self._most:,} bytes, not {len(name):,}", param, ctx)
        return name


NAME = NameType()


def shown(name: bytes) -> str:
    r"""A name as text on one line. What is not printable UTF-8 is \xNN for each byte, and a backslash is two.

    So nothing is lost: bash's $'...' makes the same bytes of it.
    """
    text = name.decode("utf-8", "surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    if letter == "\\":
        return r"\\"
    if letter.isprintable():
        return letter
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))


# ---- how a command ends ----


def say(line: str) -> None:
    """One line for the user, on stderr: stdout has nothing but data."""
    click.echo(f"counterctl: {line}", err=True)


def explain(error: Exception, server: Server | None) -> tuple[str, int]:
    """(one line, the exit status) for what a command may raise."""
    line = printable(re.sub(r"\s+", " ", str(error)))
    where = server.address if server else "the server"
    if isinstance(error, ProtocolError):
        return f"{where} does not speak this protocol: {line}", EXIT_NO_CONNECTION
    if isinstance(error, (ConnectionLost, Timeout)):
        return line, EXIT_NO_CONNECTION
    if isinstance(error, ServerError) and not isinstance(error, InvalidArguments):
        return line, EXIT_NOT_AVAILABLE
    return line, EXIT_USAGE


class Group(click.Group):
    """A group of commands, whose errors are one line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # while what goes wrong can still be told
        except BrokenPipeError:
            # Whoever reads has enough, and says so to every other program by a signal.
            discard_output()
            ctx.exit(EXIT_SIGNAL + signal.SIGPIPE)
        except KeyboardInterrupt:
            ctx.exit(EXIT_SIGNAL + signal.SIGINT)
        except (CounterdError, ValueError, OSError) as error:
            line, status = explain(error, ctx.find_object(Server))
            if isinstance(error, OSError):
                discard_output()
            say(line)
            ctx.exit(status)
        return result


def discard_output() -> None:
    """What is buffered for stdout goes nowhere, and is not tried again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
