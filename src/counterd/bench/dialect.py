"""The description of a protocol for the load: its requests as bytes, its limits, and its texts in reports.

Floor 5 (ARCHITECTURE.md), pure Python. A dialect is a module that exports DIALECT. A Codec in the same folder
(_codec.pxd) writes the requests and reads the replies. dialects/__init__.py finds the dialects. The load itself knows
only kinds of requests and three kinds of work, but no protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from counterd.bench.options import PAIRS

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.bench._board import Board
    from counterd.bench.asking import Place
    from counterd.bench.options import Options

COUNTING = ("noop", "get", "acquire", "release")
KEEPING = ("query", "update", "insert", "purge", "set")
JOBS = ("put", "cycle", "fan")
MESSAGES = ("account", "control")
OPS = (*COUNTING, *KEEPING, "flow", "param", "keep", "counts", *JOBS, *MESSAGES)  # all requests that a mix can contain
NAMED = frozenset({"names", "keys", "name-size"})  # options of a load whose requests have names
TAKING = frozenset({"items", "wait"})  # a protocol with Takes; without "wait" they do not wait
NUMBER_SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}  # bytes of --number-type
NUMBERED_SIZE = 8  # bytes of a job's body that contains the job's number
STAMPED_SIZE = 24  # bytes of a job's body that also contains the time
DIGITS_MAX = 8  # digits of a name's number, in hexadecimal
VALUE = b"v"  # buffers consist of this byte, which is not a digit of a name

Mistakes = list[tuple[bool, str]]  # for each possible mistake: whether it was made, and the error message


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
    """Returns the name in each kind of request, without its last digits: for numbers, buffers, and new names.

    run: the low 28 bits make the new names of this run differ from the names of other runs.
    """
    size = plan.name_size - min(plan.name_size, DIGITS_MAX)
    fresh = (b"i" + (b"%07x" % (run & 0xFFFFFFF))[::-1] + b"i" * size)[:size]
    kinds = {"insert": fresh, "purge": fresh, "control": fresh, "set": b"b" * size, "fetch": b"b" * size}
    return {**kinds, "": b"n" * size}


@dataclass(frozen=True)
class Dialect:
    """A protocol, as the load uses it.

    order: its place in lists for people.
    ops: the members of OPS that it has. requests: each kind of request for a name, as bytes that the codec completes.
    kind: of the work. names: the name in each kind of request, without its last digits; the key "" is for other kinds.
    fill: the requests that make a name exist; none if names need not exist. needs_fill: these are always sent.
    opening: the first requests of each connection. listening: the first requests of a connection for control messages.
    options: the options that only some protocols have, and that this one has.
    tokens: whether a permit has a token. The server chooses it when it grants, or the load when it asks.
    fetches: whether a get reads a buffer, and not a number. mistakes: the parts of a plan that this protocol cannot do.
    counts: whether the server reports how many permits of a name are held. prepare: called before a load. tidy: called
    after it. checks: makes the checks of --verify; raises LoadError or CounterdError if they are not possible.
    broken, kept: the texts for promises that were broken or kept. doubt: the question for people if no reply came.
    """

    name: str
    order: int
    port: int
    ops: tuple[str, ...]
    requests: Callable[[Options, bytes], dict[str, bytes]]
    name_size_max: int
    work: str = PAIRS
    help: str = ""
    ops_help: str = ""
    kind: Literal["permits", "jobs", "messages"] = "permits"
    names: Callable[[Options, int], dict[str, bytes]] = names_of
    fill: tuple[str, ...] = ()
    needs_fill: bool = False
    opening: tuple[str, ...] = ()
    listening: tuple[str, ...] = ()
    options: frozenset[str] = NAMED
    tokens: Literal["", "granted", "chosen"] = ""
    fetches: Callable[[Options], bool] = lambda _: False
    mistakes: Callable[[Options], Mistakes] = lambda _: []
    counts: bool = False
    prepare: Callable[[Place], None] | None = None
    checks: Callable[[Options], Checks] | None = None
    tidy: Callable[[Options], None] | None = None
    broken: str = ""
    kept: str = "nothing was granted twice, and everything was given back"
    doubt: str = "does the server speak the {protocol} protocol?"
    rules: Rules | None = None

    @property
    def codec(self) -> str:
        """Returns the name of the module with the LoadCodec, which writes requests and reads replies."""
        return f"counterd.bench.dialects._{self.name.replace('-', '_')}"
