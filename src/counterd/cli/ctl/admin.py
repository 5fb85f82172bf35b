"""`counterctl holders`, `waiters`, `holdings`, `waits`, `limit`, `connections` and `kill`, which ask the admin
endpoint.

Floor 5 (ARCHITECTURE.md). The commands send HTTP requests with the standard library, over TCP or a Unix socket. The
token is never on the command line, where every user of the machine could read it. No message contains the token. The
token is sent only with requests that need it. The address of the admin endpoint is not derived from the server's
address, so no request goes to a server that the user did not name.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote_to_bytes, urlencode, urlsplit

import click
from click.core import ParameterSource

from counterd.cli.ctl.common import NAME, Server, has_address, is_said, refused, say, shown
from counterd.cli.ctl.output import NOTHING, Column, Kind, Output, Row, output_option, shown_text
from counterd.errors import ConnectionLost, CounterdError, InvalidArguments, ServerError, Timeout

if TYPE_CHECKING:
    import socket
    import threading
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from http.client import HTTPConnection, HTTPResponse

URL = "http://127.0.0.1:11216"
PORT = 11216
PAGE = 1000  # rows: the most that one reply of the server has
REPLY_MAX = 256 << 20  # bytes: more than a page of rows with the longest names has
PIECE = 1 << 16  # bytes of a reply that are read at a time
OK, BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, BUSY = 200, 400, 401, 403, 404, 503

SHUT_RDWR = 2  # of socket, which only some commands import

F = TypeVar("F", bound="Callable[..., Any]")


class Endpoint(NamedTuple):
    """The address of an admin endpoint: host and port, or the path of a Unix socket.

    timeout: how many seconds a reply may take.
    """

    url: str
    host: str
    port: int
    path: str
    token: str
    timeout: float

    def ask(self, method: str, path: str, *, may_miss: bool = False, **parameters: object) -> Any:
        """Sends a request and returns the reply. With may_miss, a reply with status 404 returns None.

        Raises Refused, ConnectionLost or Timeout.
        """
        import json
        import threading
        from http.client import HTTPException

        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        try:
            connection = self._connected()
        except OSError as error:
            raise ConnectionLost(
                f"cannot connect to the admin endpoint at {self.url}: {error}; `admin.enable = true` in the server's "
                "configuration enables it, and --admin sets its address"
            ) from error
        overdue = threading.Event()
        alarm = threading.Timer(self.timeout, _shut, (connection.sock, overdue))  # a reply that comes byte by byte too
        alarm.start()
        try:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token and method != "GET" else {}
            connection.request(method, f"{path}?{query}" if query else path, headers=headers)
            response = connection.getresponse()
            answer = json.loads(_read(response), parse_constant=_refuse)
            why = "" if response.status == OK else shown(str(answer["error"]).encode("utf-8", "surrogatepass"))
        except (HTTPException, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            if overdue.is_set() or isinstance(error, TimeoutError):
                raise Timeout(f"{self.url} did not answer within {self.timeout:g} s") from None
            if isinstance(error, OSError):
                raise ConnectionLost(f"lost the connection to {self.url}: {error}") from error
            raise ConnectionLost(f"{self.url} is not an admin endpoint of counterd") from None
        finally:
            alarm.cancel()
            connection.close()
        if response.status == NOT_FOUND and may_miss:
            return None
        if response.status != OK:
            raise refusal(response.status, why)
        return answer

    def _connected(self) -> HTTPConnection:
        import socket
        from http.client import HTTPConnection

        connection = HTTPConnection(self.host, self.port, self.timeout)
        if self.path:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(self.timeout)
        try:
            if self.path:
                connection.sock.connect(self.path)
            else:
                connection.connect()
        except OSError:
            connection.close()
            raise
        return connection


def _shut(sock: socket.socket, overdue: threading.Event) -> None:
    overdue.set()
    with contextlib.suppress(OSError):
        sock.shutdown(SHUT_RDWR)


def _read(response: HTTPResponse) -> bytes:
    """Reads a reply, of which not more than REPLY_MAX bytes are kept."""
    body = bytearray()
    while piece := response.read1(PIECE):
        body += piece
        if len(body) > REPLY_MAX:
            raise ValueError("too long")
    return bytes(body)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Raises ConnectionLost in place of what code raises that finds something else in a reply than counterd sends."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ConnectionLost("this is not the reply of an admin endpoint of counterd") from error


HINTS = {
    UNAUTHORIZED: "set the token in COUNTERD_ADMIN_TOKEN, or name its file with --token-file",
    FORBIDDEN: "this request needs a token: set `admin.token` in the server's configuration",
}


class Refused(ServerError):
    """The endpoint refuses the request. The exception's text contains the reason and a hint."""

    def __str__(self) -> str:
        return self.text


class WrongArguments(InvalidArguments):
    """The endpoint does not accept the value of an argument."""

    def __str__(self) -> str:
        return self.text


def refusal(status: int, text: str) -> CounterdError:
    """Returns the exception for an error reply of the endpoint."""
    if status == BAD_REQUEST:
        return WrongArguments(status, text)
    if status not in (UNAUTHORIZED, FORBIDDEN, NOT_FOUND, BUSY):
        return ConnectionLost(f"the server failed: {text} (status {status})")
    hint = "" if status == FORBIDDEN and "read-only" not in text else HINTS.get(status, "")
    return Refused(status, f"{text}; {hint}" if hint else text)


# ---- options ----


def admin_options(function: F) -> F:
    """Adds the options --admin and --token-file to a command. endpoint_of() makes an Endpoint from them."""
    function = click.option(
        "--admin",
        metavar="URL",
        envvar="COUNTERD_ADMIN",
        show_envvar=True,
        default=URL,
        help=f"The admin endpoint: http://host:port, host:port or unix:/path.  [default: {URL}]",
    )(function)
    return click.option(
        "--token-file", type=click.File(), metavar="FILE", help="The file with the server's admin.token."
    )(function)


def read_url(url: str) -> tuple[str, int, str]:
    """The address as host, port, and path of a Unix socket."""
    if url.startswith("unix:/"):
        return "localhost", PORT, re.sub("^//(?=/)", "", url.removeprefix("unix:"))
    try:
        read = urlsplit(url if re.match("[a-z]+:(?![0-9])", url) else f"http://{url}")  # HOST:PORT, as in admin.bind
        port = read.port
    except ValueError as error:
        raise click.UsageError(f"{url!r}: {error}") from None
    rest = read.query or read.fragment or read.username or read.password or read.path.strip("/")
    if read.scheme != "http" or not read.hostname or rest:
        raise click.UsageError(f"{url!r}: expected http://HOST:PORT, HOST:PORT or unix:/PATH")
    return read.hostname, PORT if port is None else port, ""


def other_address(context: click.Context) -> str:
    """Returns the option or the environment variable with which the user has named the server of a group of commands.

    Returns an empty string if the user has named no server.
    """
    groups = (context, context.find_root())  # of the root, only options count, not its environment variable
    if group := next(filter(has_address, groups), None):
        return f"the address before `{group.invoked_subcommand}`"
    if is_said(context, "url", ParameterSource.ENVIRONMENT):
        return next(str(each.envvar) for each in context.command.params if each.name == "url")
    return ""


def endpoint_of(context: click.Context, admin: str, token_file: Any) -> Endpoint:
    """Makes an Endpoint from the options of admin_options()."""
    above = context.parent
    assert above is not None
    if is_said(context, "admin", ParameterSource.DEFAULT) and (said := other_address(above)):
        raise click.UsageError(
            f"{said} is for the {above.obj.what}; name the admin endpoint with --admin URL or COUNTERD_ADMIN"
        )
    token = (token_file.read() if token_file else os.environ.get("COUNTERD_ADMIN_TOKEN", "")).strip()
    if not token.isascii() or not token.isprintable():
        raise click.UsageError("the token must be one line of printable ASCII")
    server = above.find_object(Server)
    assert server is not None  # the group has made it
    return Endpoint(admin, *read_url(admin), token, server.timeout)


# ---- commands ----


@click.command()
@click.argument("name", type=NAME)
@click.option("--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows.")
@admin_options
@output_option
@click.pass_context
def holders(context: click.Context, /, name: bytes, limit: int, output: Output, **where: Any) -> None:
    """Shows which connections hold permits of a counter, and for how long.

    The exit status is 1 if no connection holds a permit of the counter.
    """
    if not show("holders", endpoint_of(context, **where), output, name=name, limit=limit):
        refused(f"nobody holds {shown(name)}")


@click.command()
@click.argument("connection", metavar="ID")
@click.option("--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows.")
@admin_options
@output_option
@click.pass_context
def holdings(context: click.Context, /, connection: str, limit: int, output: Output, **where: Any) -> None:
    """Shows what a connection holds: permits, tokens, reserved jobs, or the channels that it is subscribed to.

    `counterctl waits` shows what a connection waits for. `counterctl connections` and `counterctl holders` show the IDs
    of connections. The exit status is 1 if the connection holds nothing or does not exist.
    """
    if not show_of(connection, endpoint_of(context, **where), output, limit):
        refused(f"{shown_text(connection)} holds nothing")


@click.command()
@click.argument("name", type=NAME, required=False)
@click.option(
    "--sort",
    type=click.Choice(["age", "amount"]),
    help=("The column to sort by, with the largest value first. Only without NAME.  [default: age]"),
)
@click.option("--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows.")
@admin_options
@output_option
@click.pass_context
def waiters(
    context: click.Context, /, name: bytes | None, sort: str | None, limit: int, output: Output, **where: Any
) -> None:
    """Shows which connections wait for a counter or a rate, in the order in which the server serves them. Without NAME,
    the command shows the waiters of all counters and rates.

    Without NAME, the longest wait comes first. The exit status is 1 if no connection waits.
    """
    if name is not None and sort is not None:
        raise click.UsageError("give either NAME or --sort")
    endpoint = endpoint_of(context, **where)
    if name is None:
        found = show("waiters", endpoint, output, sort=sort, limit=limit)
    else:
        found = show("queue", endpoint, output, name=name, limit=limit)
    if not found:
        refused("nobody waits" if name is None else f"nobody waits for {shown(name)}")


@click.command()
@click.argument("connection", metavar="ID")
@click.option("--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows.")
@admin_options
@output_option
@click.pass_context
def waits(context: click.Context, /, connection: str, limit: int, output: Output, **where: Any) -> None:
    """Shows what a connection of the counter protocol waits for.

    `counterctl connections` and `counterctl waiters` show the IDs of connections. The exit status is 1 if the
    connection waits for nothing or does not exist.
    """
    if not show_of(connection, endpoint_of(context, **where), output, limit, number=1):
        refused(f"{shown_text(connection)} waits for nothing")


@click.command()
@click.argument("name", type=NAME, required=False)
@click.option("--limit", type=click.IntRange(1, PAGE), default=PAGE, metavar="N", help="Show at most N rows.")
@admin_options
@output_option
@click.pass_context
def limit(context: click.Context, /, name: bytes | None, limit: int, output: Output, **where: Any) -> None:
    """Shows which limits of the server apply to a name, and how much of that name is in use. Without NAME, the command
    shows all limits.

    The limits are those that the server has loaded from the file counter.limits. The exit status is 1 if there are no
    limits.
    """
    endpoint = endpoint_of(context, **where)
    if name is None:
        found = show("limits", endpoint, output, limit=limit)
    else:
        found = show("limit", endpoint, output, name=name, limit=limit)
    if not found:
        refused("the server has no limits" if name is None else f"no limit applies to {shown(name)}")


# ---- tables: the server says which tables it has, and which columns ----

KINDS = {
    "name": Kind.BYTES,
    "integer": Kind.NUMBER,
    "text": Kind.TEXT,
    "connection": Kind.TEXT,
    "seconds": Kind.SPAN,
}
WHO = ("connection", "peer")  # the columns for the holder


class Table(NamedTuple):
    """A table that a server can list.

    sorts: the columns to sort by. parameters: the other parameters of its request.
    """

    name: str
    protocol: str
    columns: list[Column]
    sorts: list[str]
    parameters: list[str]

    @understood()
    def ask(self, endpoint: Endpoint, /, **parameters: Any) -> Any:
        """Returns the reply with the rows, in which names are bytes. Raises the same as Endpoint.ask()."""
        answer = endpoint.ask("GET", f"/{self.name}", **parameters)
        names = [each.name for each in self.columns if each.kind is Kind.BYTES]
        for row in answer["rows"]:
            row.update({name: unquote_to_bytes(row[name]) for name in names})
        return answer

    def without(self, names: Container[str]) -> Table:
        """Returns a copy of the table without the named columns."""
        return self._replace(columns=[each for each in self.columns if each.name not in names])


@understood()
def columns_of(answer: Mapping[str, Any]) -> list[Column]:
    """Returns the columns that a reply describes."""
    return [
        Column(
            each["name"],
            KINDS[each["kind"]],
            each["name"].removesuffix("_seconds"),
            "gone" if each["kind"] == "connection" else NOTHING,
            each["detail"],
        )
        for each in answer["columns"]
    ]


@understood()
def tables_of(endpoint: Endpoint) -> list[Table]:
    """Returns all tables of a server. Raises the same as Endpoint.ask()."""
    return [
        Table(each["name"], each["protocol"], columns_of(each), each["sorts"], each["parameters"])
        for each in endpoint.ask("GET", "/stats")["tables"]
    ]


def table_of(endpoint: Endpoint, connection: str, number: int = 0) -> Table | None:
    """Returns the table of the holdings of a connection; with number=1, the table of its waits.

    Returns None if connections of this protocol hold nothing, or never wait. Raises WrongArguments if the server does
    not have the protocol.
    """
    protocol = connection.partition("-")[0]
    tables = [table for table in tables_of(endpoint) if table.protocol == protocol]
    found = [table.without(WHO) for table in tables if "connection" in table.parameters]
    if tables:
        return found[number] if number < len(found) else None
    raise WrongArguments(BAD_REQUEST, f"{connection!r} is not a connection id such as counter-4-12")


def other_tables(endpoint: Endpoint) -> tuple[Table, ...]:
    """Returns all tables that can be sorted, except the table of the counters."""
    return tuple(table for table in tables_of(endpoint) if table.sorts and table.name != "counters")


def show(name: str, endpoint: Endpoint, output: Output, /, **parameters: Any) -> bool:
    """Shows a table of the server. Returns False if the table has no rows. Raises the same as Endpoint.ask()."""
    table = next((each for each in tables_of(endpoint) if each.name == name), None)
    if table is None:
        raise Refused(NOT_FOUND, f"no table {name!r}: is its protocol enabled?")
    return show_rows(table, endpoint, output, **parameters)


def show_of(connection: str, endpoint: Endpoint, output: Output, limit: int, number: int = 0) -> bool:
    """Shows the rows of table_of(). Returns False if the table has no rows. Raises the same as Endpoint.ask()."""
    table = table_of(endpoint, connection, number)
    return table is not None and show_rows(table, endpoint, output, connection=connection, limit=limit)


@understood()
def show_rows(table: Table, endpoint: Endpoint, output: Output, /, **parameters: Any) -> bool:
    """Shows the rows of a reply. Returns False if the reply has no rows."""
    answer = table.ask(endpoint, **parameters)
    output.rows(table.columns, [listed(table.columns, row) for row in answer["rows"]])
    say_total(answer)
    return bool(answer["rows"])


def say_total(answer: dict[str, Any]) -> None:
    """Prints the number of existing rows, if not all of them are shown."""
    if answer["total"] > len(answer["rows"]) > 0:
        say(f"showing {len(answer['rows']):,} of {answer['total']:,} rows")


@click.command()
@click.option("--protocol", metavar="NAME", help="Show only connections of this protocol, such as counter.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows.")
@admin_options
@output_option
@click.pass_context
@understood()
def connections(
    context: click.Context, /, protocol: str | None, limit: int | None, output: Output, **where: Any
) -> None:
    """Shows all connections. The JSON and CSV output also has the TLS details.

    The column id has the IDs for `counterctl kill` and `counterctl holdings`.
    """
    columns: list[Column] = []
    rows: list[Row] = []
    for page in pages_of_connections(endpoint_of(context, **where), protocol, limit):
        columns = columns_of(page)
        rows += [listed(columns, row) for row in page["rows"]]
    output.rows(columns, rows[:limit])
    if not rows:
        say("no connections")


def pages_of_connections(endpoint: Endpoint, protocol: str | None, limit: int | None) -> Iterator[Any]:
    """Yields the replies that together list all connections. A connection that begins or ends meanwhile may be missing.

    A limit of 0 also yields a reply, with one row, because the caller needs its columns.
    """
    after, left = None, limit
    while True:
        size = PAGE if left is None else min(max(left, 1), PAGE)
        answer = endpoint.ask("GET", "/connections", protocol=protocol, limit=size, after=after)
        yield answer
        after = answer["next"]
        left = None if left is None else left - size
        if after is None or (left is not None and left <= 0):
            return


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@admin_options
@click.pass_context
def kill(context: click.Context, /, ids: tuple[str, ...], **where: Any) -> None:
    """Closes connections. The server takes back everything that they hold. `kill` needs the server's admin.token.

    `counterctl connections` and `counterctl holders` show the IDs of connections. The ID of a connection is never used
    for another connection.
    """
    endpoint = endpoint_of(context, **where)
    missing = [each for each in ids if not end_connection(endpoint, each)]
    if missing:
        refused(f"not found: {', '.join(missing)}")


def end_connection(endpoint: Endpoint, connection: str) -> bool:
    """Closes a connection. Returns False if no connection has this id."""
    return endpoint.ask("DELETE", f"/connections/{quote(connection, safe='')}", may_miss=True) is not None


def listed(columns: Sequence[Column], row: dict[str, Any]) -> Row:
    """Returns the cells of a row, with None in place of an empty string.

    If another protocol of the server holds or waits for something, the row has no id of a connection, and the name of
    the protocol is in the column of the peer. Then the name is moved to the column of the connection.
    """
    if row.get("connection") == "" and row.get("peer"):
        row = {**row, "connection": row["peer"], "peer": ""}
    return [None if row[column.name] == "" else row[column.name] for column in columns]
