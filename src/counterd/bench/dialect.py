"""The description of a protocol for the load: its requests as bytes, its limits, and its texts in reports.

Floor 5 (ARCHITECTURE.md), pure Python. A dialect is a module that exports DIALECT. A Codec in the same folder
(_codec.pxd) writes the requests and reads the replies. dialects/__init__.py finds the dialects. The load itself knows
only roles of requests and three kinds of work, but no protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from counterd.bench.options import PAIRS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.bench._board import Board
    from counterd.bench.connection import Place
    from counterd.bench.options import Options

NAMED = frozenset({"names", "keys", "name-size"})  # options of a load whose requests have names
TAKING = frozenset({"items", "wait"})  # a protocol with Takes; without "wait" they do not wait
GRANTED = frozenset({"resources", "maximum"})
LASTING = frozenset({"ttl"})
SIZED = frozenset({"value-size"})
SPECIAL = NAMED | GRANTED | LASTING | SIZED | {"number-type"}  # all that only some protocols or requests have
NUMBER_SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}  # bytes of --number-type
NUMBERED_SIZE = 8  # bytes of a job's body that contains the job's number
STAMPED_SIZE = 24  # bytes of a job's body that also contains the time
DIGITS_MAX = 8  # digits of a name's number, in hexadecimal
VALUE = b"v"  # buffers consist of this byte, which is not a digit of a name

Mistakes = list[tuple[bool, str]]  # for each possible mistake: whether it was made, and the error message


@dataclass(frozen=True)
class Op:
    """A kind of requests.

    role: what the load does with such requests, a member of Role (_codec.pxd) in lower case. "": it sends them, and
    counts the replies. names: which names they have, of those that the dialect has; "": none. options: the members of
    SPECIAL that matter to them. needs_name: whether a name has to exist before.
    """

    role: str = ""
    names: str = "number"
    options: frozenset[str] = frozenset()
    needs_name: bool = False


NOOP, ACQUIRE, RELEASE = Op(names=""), Op("acquire", options=GRANTED), Op("release", options=GRANTED)
COUNTING = {"noop": NOOP, "get": Op("count"), "acquire": ACQUIRE, "release": RELEASE}
KEEPING = {
    "query": Op(needs_name=True),
    "update": Op("raise", needs_name=True),
    "insert": Op("create", "new", LASTING),
    "purge": Op("remove", "new", LASTING),
    "set": Op("", "buffer", SIZED | LASTING),
}
FETCH = Op("", "buffer", SIZED, needs_name=True)


@dataclass(frozen=True)
class Checks:
    """The checks of --verify, after the load and after its connections were closed.

    Both check functions return violations.
    """

    while_held: Callable[[Board], list[str]]
    when_gone: Callable[[Board], list[str]]


@dataclass(frozen=True)
class Rules:
    """The rules that `counterbench rules` prints.

    write: makes the rules from a number of names and their maximum. It may raise ValueError.
    """

    write: Callable[[int, int], str]
    help: str


def names_of(plan: Options, run: int) -> dict[str, bytes]:
    """Returns the names of numbers, of buffers, and new names, each without its last digits.

    run: the low 28 bits make the new names of this run differ from the names of other runs.
    """
    size = plan.name_size - min(plan.name_size, DIGITS_MAX)
    fresh = (b"i" + (b"%07x" % (run & 0xFFFFFFF))[::-1] + b"i" * size)[:size]
    return {"number": b"n" * size, "buffer": b"b" * size, "new": fresh}


@dataclass(frozen=True)
class Dialect:
    """A protocol, as the load uses it.

    order: its place in lists for people. ops: the kinds of requests that a mix can contain. inner: those that the load
    sends by itself. requests: each kind of request for a name, as bytes that the codec completes. sent: the kind that
    is sent for a member of ops. kind: of the work. names: the names of requests, by Op.names, without their last
    digits. fills: the requests that make a name exist, by Op.names; none if names need not exist. needs_fill: these are
    always sent. opening: the first requests of each connection. listening: those of a connection for control messages;
    the last one waits for the replies to the others. options: the options that only some protocols have, and that this
    one has. tokens: whether a permit has a token. The server chooses it when it grants, or the load when it asks.
    mistakes: the parts of a plan that this protocol cannot do. prepare: called before a load. tidy: called after it.
    checks: makes the checks of --verify; raises LoadError or CounterdError if they are not possible. broken, kept: the
    texts for promises that were broken or kept. doubt: the question for people if no reply came.
    """

    name: str
    order: int
    port: int
    ops: Mapping[str, Op]
    requests: Callable[[Options, bytes], dict[str, bytes]]
    name_size_max: int
    work: str = PAIRS
    help: str = ""
    ops_help: str = ""
    kind: Literal["permits", "jobs", "messages"] = "permits"
    inner: Mapping[str, Op] = field(default_factory=dict)
    sent: Callable[[Options, str], str] = lambda _, op: op
    names: Callable[[Options, int], dict[str, bytes]] = names_of
    fills: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs_fill: bool = False
    opening: tuple[str, ...] = ()
    listening: tuple[str, ...] = ()
    options: frozenset[str] = NAMED
    tokens: Literal["", "granted", "chosen"] = ""
    mistakes: Callable[[Options], Mistakes] = lambda _: []
    prepare: Callable[[Place], None] | None = None
    checks: Callable[[Options], Checks] | None = None
    tidy: Callable[[Options], None] | None = None
    broken: str = ""
    kept: str = "nothing was granted twice, and everything was given back"
    doubt: str = "does the server speak the {protocol} protocol?"
    rules: Rules | None = None

    def all_ops(self) -> dict[str, Op]:
        return {**self.ops, **self.inner}

    @property
    def codec(self) -> str:
        """Returns the name of the module with the LoadCodec, which writes requests and reads replies."""
        return f"counterd.bench.dialects._{self.name.replace('-', '_')}"
