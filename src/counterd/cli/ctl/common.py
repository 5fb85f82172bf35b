"""Code that all commands of counterctl share: addresses, names, durations, and the handling of errors.

Floor 5 (ARCHITECTURE.md). This file imports no client before it is needed, because completion needs only the names of
the commands.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from counterd.cli.options import TLS_OPTIONS, F, ParamType, Reads, at_least, with_options
from counterd.errors import CounterdError, InvalidArguments, ProtocolError, ServerError
from counterd.units import printable, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.shell_completion import CompletionItem

    from counterd.client import Client
    from counterd.client._addresses import Address

EXIT_NOT_AVAILABLE = 1
EXIT_USAGE = 2
EXIT_NO_CONNECTION = 3
EXIT_SIGNAL = 128  # plus the number of the signal, as in shells

HOST = "127.0.0.1"
PORT = 11215

NAME_MAX = 65_535  # bytes
COMPLETION_S = 0.5  # how long somebody who presses Tab waits for the names of counters
DURATION_MAX = 60e6  # seconds, two years: every clock and every system call can wait for this time


class Server:
    """A server that the options name. The server is not connected yet.

    what: what the server has, for messages. protocol: the server's protocol, for messages.
    """

    what = "things"
    protocol = "a protocol"

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for a client: `Client(**server.arguments)`.

        Raises OSError if a file for TLS cannot be used.
        """
        host, port, path, tls = self.address
        where = {"path": path} if path else {"host": host, "port": port}
        return {"timeout": self.timeout, **where} | ({"tls": self.address.make_context()} if tls else {})


class Target(Server):
    """The server of the counter protocol. name: the name that this command states on its connections; "" for none."""

    what = "counters"
    protocol = "the counter protocol"

    def __init__(self, address: Address, timeout: float, name: str = "") -> None:
        super().__init__(address, timeout)
        self.name = name

    def connect(self, **options: Any) -> Client:
        """Returns a connected client. options: options for the client, which override those of the command line."""
        client = self.make(**options)
        client.fileno()  # connects
        return client

    def make(self, **options: Any) -> Client:
        """Returns a client that connects when it is first used."""
        from counterd.client import Client

        return Client(**{**self.arguments, "name": self.name, **options})


pass_target = click.make_pass_decorator(Target)


# The options from which chosen_address() makes an address.
ADDRESS_OPTIONS = ("url", "host", "port", "socket", "tls", "cacert", "cert", "key")


def address_options(scheme: str, port: int, variable: str) -> Callable[[F], F]:
    """Returns a decorator that adds ADDRESS_OPTIONS and --timeout to a command."""
    return with_options(
        click.option(
            "-u",
            "--url",
            envvar=variable,
            show_envvar=True,
            help=f"The server: {scheme}://host:port, {scheme}s://host:port (TLS) or {scheme}+unix:///path.",
        ),
        click.option("-h", "--host", help=f"The server's host.  [default: {HOST}]"),
        click.option(
            "-p", "--port", type=click.IntRange(1, 65535), metavar="PORT", help=f"The server's port.  [default: {port}]"
        ),
        click.option("-s", "--socket", metavar="PATH", help="The server's Unix socket."),
        *TLS_OPTIONS,
        click.option("--timeout", type=TIME_LIMIT, default=5.0, help="How long a reply may take.  [default: 5s]"),
    )


def has_address(context: click.Context) -> bool:
    """Returns whether the command line names the server, with one of ADDRESS_OPTIONS."""
    return any(is_said(context, name) for name in ADDRESS_OPTIONS)


def is_said(context: click.Context, name: str, source: ParameterSource = ParameterSource.COMMANDLINE) -> bool:
    """Returns whether the value of an option comes from this source, such as the command line."""
    return context.get_parameter_source(name) is source


def timeout_below(context: click.Context, timeout: float, what: str) -> float:
    """Returns the timeout for a group of commands: the group's own option, or else the option of counterctl.

    Raises UsageError if the server's address precedes the name of the group. what: what the server has, for the
    message.
    """
    above = context.parent
    assert above is not None
    if has_address(above):
        raise click.UsageError(
            f"this address is for the counters: write the address of the {what} after `{context.info_name}`"
        )
    if above.params.get("name"):
        raise click.UsageError("--name is for connections of the counter protocol")
    if context.get_parameter_source("timeout") is ParameterSource.DEFAULT:
        timeout = above.find_object(Target).timeout  # type: ignore[union-attr]  # made by the group above
    return timeout


def chosen_address(context: click.Context, scheme: str, port: int) -> Address:
    """Makes the server's address from the options. The command line takes precedence over the environment."""
    from counterd.client._addresses import Address, read_address

    options = context.params
    url, host, path = options["url"], options["host"], options["socket"]
    over_tcp = host is not None or options["port"] is not None
    by_url = context.get_parameter_source("url") is ParameterSource.COMMANDLINE
    if by_url + over_tcp + (path is not None) > 1:
        raise click.UsageError("name the server with only one of these: --url, --host and --port, or --socket")
    try:
        if path is None:
            read = read_address(host or HOST if over_tcp or url is None else url, options["port"] or port, scheme)
        elif path:
            read = Address(path=path)
        else:
            raise click.UsageError("the path of --socket is empty")
        return secured(read, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def secured(address: Address, options: dict[str, Any]) -> Address:
    """Adds TLS to an address if the options require it.

    The TLS options override a URL. Raises ValueError if the TLS options are wrong.
    """
    from counterd.client._addresses import Tls, with_tls

    files = {name: options[name] for name in Tls._fields if options[name] is not None}
    if not (options["tls"] or files):
        return address
    address = with_tls(address, True)
    assert isinstance(address.tls, Tls)
    tls = address.tls._replace(**({"key": ""} if "cert" in files else {}) | files)
    if tls.key and not tls.cert:
        raise ValueError("--key needs --cert")
    return address._replace(tls=tls)


# ---- values of the command line ----


def duration(text: str) -> float:
    """Converts a duration such as 500ms, 10s or 2m to seconds."""
    value = seconds(text)
    if value > DURATION_MAX:
        raise ValueError(f"expected at most {DURATION_MAX / 60:.0f}m, not {text!r}")
    return value


DURATION = Reads("duration", duration)
TIME_LIMIT = Reads("duration", at_least(0.001, duration))


class Bytes(ParamType):
    """The type of an argument that becomes bytes, in any locale. least, most: the allowed number of bytes."""

    def __init__(self, name: str, least: int, most: int) -> None:
        self.name = name
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        found = os.fsencode(value)
        if not self._least <= len(found) <= self._most:
            article = "an" if self.name[0] in "aeiou" else "a"
            self.fail(
                f"{article} {self.name} has {self._least} to {self._most:,} bytes, not {len(found):,}", param, ctx
            )
        return found


class CounterName(Bytes):
    """The type of the name of a counter. Shells complete the names that the server has, if it answers at once."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            with Target(chosen_address(ctx.find_root(), "counter", PORT), COMPLETION_S).make() as client:
                found = sorted(as_text(entry.name) for entry in client.dump())
        except (CounterdError, OSError, click.UsageError):
            return []
        # Shells would need quotes, or a second line, for others.
        plain = (name for name in found if name.startswith(incomplete) and re.fullmatch(r"[\w.:/@%+=,-]+", name))
        return [CompletionItem(name) for name in plain]


NAME = CounterName("name", 1, NAME_MAX)


def as_text(name: bytes) -> str:
    """Decodes a name to a string. Each byte that is not UTF-8 becomes one character."""
    return name.decode("utf-8", "surrogateescape")


def glob(pattern: str | None) -> Callable[[bytes], object]:
    """Returns a function that tells whether a name matches a pattern.

    The pattern None matches all names; ? matches one character.
    """
    if pattern is None:
        return lambda _: True
    like = re.compile(fnmatch.translate(as_text(os.fsencode(pattern)))).match
    return lambda name: like(as_text(name))


def shown(name: bytes) -> str:
    r"""Formats a name as one line: each byte that is not printable UTF-8 becomes \xNN, and a backslash is doubled.

    The line is unambiguous: bash's $'...' turns it into the same bytes again.
    """
    text = as_text(name)
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
    """Prints a line for the user on stderr. stdout has only data."""
    click.echo(f"counterctl: {line}", err=True)


def refused(why: str) -> NoReturn:
    """Prints why the server refused the command, and ends the command with exit status 1."""
    say(why)
    click.get_current_context().exit(EXIT_NOT_AVAILABLE)


def explain(error: Exception, server: Server | None) -> tuple[str, int]:
    """Returns the message, as one line, and the exit status for an exception of a command."""
    line = printable(re.sub(r"\s+", " ", re.sub(r"\[Errno -?[0-9]+\] ", "", str(error))))
    if isinstance(error, ProtocolError) and server is not None:
        return f"{server.address} does not speak {server.protocol}: {line}", EXIT_NO_CONNECTION
    if isinstance(error, InvalidArguments) or not isinstance(error, CounterdError):
        return line, EXIT_USAGE
    return line, EXIT_NOT_AVAILABLE if isinstance(error, ServerError) else EXIT_NO_CONNECTION


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM inside terminations_interrupt()."""


@contextlib.contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Within this block, SIGTERM raises Terminated, as SIGINT always raises KeyboardInterrupt."""

    def interrupt(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupted(error: KeyboardInterrupt) -> int:
    """Returns the exit status of a command that a signal ended.

    Also ends the line on which the terminal has shown ^C.
    """
    if isinstance(error, Terminated):
        return EXIT_SIGNAL + signal.SIGTERM
    if sys.stderr.isatty():
        click.echo(err=True)
    return EXIT_SIGNAL + signal.SIGINT


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """For commands that run until Ctrl-C: the signal ends the block without an error."""
    try:
        yield
    except KeyboardInterrupt as error:
        interrupted(error)


class Group(click.Group):
    """A group of commands. Turns an error of a command into one line and an exit status."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
        if near and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            if has_output():
                sys.stdout.flush()  # here, where an error can still be reported
        except BrokenPipeError:
            # The reader has closed the pipe. Other programs end by SIGPIPE then.
            discard_output()
            ctx.exit(EXIT_SIGNAL + signal.SIGPIPE)
        except KeyboardInterrupt as error:
            ctx.exit(interrupted(error))
        except (CounterdError, ValueError, OSError) as error:
            line, status = explain(error, ctx.find_object(Server))
            if isinstance(error, OSError):
                discard_output()
            say(line)
            ctx.exit(status)
        return result


def has_output() -> bool:
    """Returns whether stdout was open when this process started."""
    return sys.stdout is not None


def discard_output() -> None:
    """Discards the data that is still buffered for stdout, so that the interpreter does not write it at its end."""
    if not has_output():
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
