"""The floors: imports point down only; protocols import no other protocol, and no other code names one.

See docs/ARCHITECTURE.md, "Floors". The tests read every import and cimport statement in src/counterd, including
those for type checkers."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "counterd"
PROTOCOLS = sorted(path.name for path in (PACKAGE / "protocols").iterdir() if (path / "__init__.py").exists())

# By the first part of a module's name below counterd; what is not here is on floor 0.
FLOORS = {
    "_core": 1,
    "engine": 1,
    "cluster": 2,
    "protocols": 2,
    "net": 3,
    "control": 4,
    "extensions": 5,
    "cli": 5,
    "__main__": 5,
    "client": 5,
    "bench": 5,
    "admin": 5,
    "journal": 5,
}
FLOOR_0 = {"contract", "errors", "ipc", "json_documents", "settings", "tables", "units", "version", "__init__"}

# All that the engine and the protocols may use besides counterd: nothing here knows clocks, sockets, files or loops.
BELOW_NET = {
    "__future__", "collections", "collections.abc", "cpython.bytes", "cpython.list", "cpython.mem", "cython",
    "dataclasses", "enum", "functools", "importlib", "ipaddress", "libc.stdint", "libc.string", "math", "pkgutil",
    "operator", "pathlib", "posix.mman", "re", "struct", "typing", "unicodedata",
}  # fmt: skip
# The key of the hash, drawn when a protocol makes its store.
BELOW_NET_EXCEPT = {str(path.relative_to(PACKAGE)): {"os"} for path in PACKAGE.glob("protocols/*/__init__.py")}
# The bytes of a path, as the kernel counts them.
BELOW_NET_EXCEPT["settings.py"] = {"os"}
# A document that others have read from somewhere.
BELOW_NET_EXCEPT["json_documents.py"] = {"json"}
BELOW_NET_EXCEPT["protocols/sentinel/rules.py"] = {"difflib", "json"}
BELOW_NET_EXCEPT["protocols/smockron/rules.py"] = {"fractions"}
BELOW_NET_EXCEPT["protocols/counter/limits.py"] = {"fractions"}
# The same hash of a name in each daemon; the beginning of what a server has sent.
BELOW_NET_EXCEPT["cluster/lease_protocol.py"] = {"reprlib", "zlib"}
# Whose call a thread is at, among several.
BELOW_NET_EXCEPT["protocols/sentinel/extensions.py"] = {"contextvars"}
# The connection to a database is handed in by whoever opened it.
BELOW_NET_EXCEPT["contract.py"] = {"sqlite3"}
BELOW_NET_EXCEPT["protocols/beanstalk/journal.py"] = {"sqlite3", "base64", "contextlib", "heapq", "itertools", "zlib"}
BELOW_NET_EXCEPT["protocols/beanstalk/_journal.pyx"] = {"zlib"}
# The lowest ids of many.
BELOW_NET_EXCEPT["protocols/beanstalk/_listing.pyx"] = {"heapq"}

# The half of a protocol that its clients need.
CLIENTS_HALF = re.compile(r"counterd\.errors$|counterd\.protocols\.\w+\.(wire|errors)$")

# The sides and the load tester need the server's insides as little as a stranger's program does.
WIRE = r"counterd\.protocols\.\w+(\.(wire|errors))?$"
SIDES = {
    "client": re.compile(rf"counterd\.errors$|counterd\.client\b|{WIRE}"),
    "bench": re.compile(
        r"counterd\.(errors|units|version|engine\.byteorder|client(\._addresses|\._tls)?)$"
        r"|counterd\.net\.(clock|kernel)$"
        rf"|counterd\.bench\b(?!\.dialects\._?({'|'.join(PROTOCOLS)})$)"
    ),
    "admin": re.compile(r"counterd\.(contract|errors|ipc|tables|units|version|settings|protocols)$|counterd\.admin\b"),
    "journal": re.compile(r"counterd\.(contract|ipc|protocols)$|counterd\.journal\b"),
}

# In a protocol's folder, and what the load tester says to one server.
OF_PROTOCOL = re.compile(r"counterd\.(?:protocols\.|bench\.dialects\._?)(\w+)")

CYTHON_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+c?import\s+(.*)|c?import\s+(.*))$", re.MULTILINE)
CYTHON_EXTERN = re.compile(r"^\s*cdef\s+extern\s+from\s+[\"<]+([\w./]+)", re.MULTILINE)


def sources() -> list[str]:
    """The package's sources, relative to it, in POSIX spelling."""
    found = (path for pattern in ("*.py", "*.pyi", "*.pyx", "*.pxd") for path in PACKAGE.rglob(pattern))
    return sorted(path.relative_to(PACKAGE).as_posix() for path in found)


def imported(source: str, text: str) -> Iterator[str]:
    """The full names of the modules that a source imports; of `from a import b` it is a.b if that is a module."""
    assert not re.search(r"^\s*from\s+\.", text, re.MULTILINE), f"{source}: relative imports hide where they go"
    if source.endswith((".py", ".pyi")):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                yield from (resolved(node.module, alias.name) for alias in node.names)
        return
    for module, names, modules in CYTHON_IMPORT.findall(text):
        for name in (names or modules).strip("( ").split(","):
            word = name.split()[0] if name.split() else "*"
            yield resolved(module, word) if module else word


def resolved(module: str, name: str) -> str:
    path = SRC / module.replace(".", "/") / name
    is_module = path.is_dir() or any(path.with_suffix(suffix).exists() for suffix in (".py", ".pyx", ".pxd"))
    return f"{module}.{name}" if module.partition(".")[0] == "counterd" and is_module else module


def floor(module: str) -> int:
    """The floor of a module of counterd, by its full name."""
    return FLOORS.get(module.partition(".")[2].partition(".")[0], 0)


def module_of(source: str) -> str:
    return ".".join(("counterd", *Path(source).with_suffix("").parts)).removesuffix(".__init__")


def wrong_imports(source: str, text: str) -> list[str]:
    """The imports that are forbidden in a module, with the reason."""
    own = module_of(source)
    protocol = found[1] if (found := OF_PROTOCOL.match(own)) else None
    spoken = own.split(".")[3] if own.startswith("counterd.cli.ctl.") else None  # by the commands of one protocol
    side = f"{own}.".split(".")[1]
    wrong = []
    for module in imported(source, text):
        parts = module.split(".")
        if parts[0] != "counterd":
            if floor(own) <= 2 and module not in BELOW_NET | BELOW_NET_EXCEPT.get(source, set()):
                wrong.append(f"{module}: not for what is below net")
        elif side in SIDES:
            ours = protocol and re.search(rf"\.(protocols\.{protocol}\.wire|dialects\._?{protocol})$", module)
            if not (ours or SIDES[side].match(module)):
                wrong.append(f"{module}: a side stands on errors and wire")
        elif floor(module) > floor(own):
            wrong.append(f"{module}: floor {floor(module)} is above floor {floor(own)}")
        elif SIDES.keys() & parts[1:2] and not own.startswith(("counterd.cli.", "counterd.__main__")):
            wrong.append(f"{module}: the daemon needs no side")
        elif spoken in parts[2:3] and CLIENTS_HALF.match(module):
            pass
        elif parts[1:2] == ["protocols"] and len(parts) > 2 and parts[2] != protocol:
            wrong.append(f"{module}: a protocol that nobody else may know")
        elif own.endswith((".wire", ".errors")) and not CLIENTS_HALF.match(module):
            wrong.append(f"{module}: a client's half of a protocol works where nothing is compiled")
    return wrong


def test_imports_point_down() -> None:
    found = {source: wrong_imports(source, (PACKAGE / source).read_text("utf-8")) for source in sources()}
    assert {source: wrong for source, wrong in found.items() if wrong} == {}


def test_every_module_is_on_a_floor() -> None:
    """A new one has to be added to a floor here."""
    assert {Path(source).parts[0].partition(".")[0] for source in sources()} == {*FLOORS, *FLOOR_0}


def test_nothing_below_net_calls_the_system() -> None:
    """Neither by an import nor through a header of C."""
    below = [source for source in sources() if source.startswith(("_core", "engine/", "protocols/"))]
    assert below
    assert [source for source in below if CYTHON_EXTERN.search((PACKAGE / source).read_text("utf-8"))] == []


def test_protocols_are_found() -> None:
    assert "counter" in PROTOCOLS


# Where a protocol may be named: in its folder, and in what speaks it from the other side. Not in the admin process
# either, where Prometheus's word for a metric that only rises is a name too.
NAMING = ("protocols/", "client/", "bench/dialects/", "cli/ctl/", "admin/")


def named_protocols(source: str, text: str) -> list[str]:
    """The lines that name a protocol, or the server whose files one of them reads. Kinds of metrics do not count."""
    if source == "tables.py":
        text = text.replace('kind: Literal["counter", "gauge"]', "")
    return re.findall(rf"^.*\b(?:{'|'.join(PROTOCOLS)}|yrmcds)\b.*$", text, re.MULTILINE)


def test_no_other_code_names_a_protocol() -> None:
    finding = {"protocols/__init__.py", "bench/dialects/__init__.py"}
    others = [source for source in sources() if not source.startswith(NAMING) or source in finding]
    found = {source: named_protocols(source, (PACKAGE / source).read_text("utf-8")) for source in others}
    assert {source: lines for source, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source", ["_core.pyx", "contract.py", "control/x.py", "engine/x.pxd", "errors.py", "tables.py", "net/x.py"]
)
@pytest.mark.parametrize("protocol", [*PROTOCOLS, "yrmcds"])
def test_a_name_of_a_protocol_is_found(source: str, protocol: str) -> None:
    line = f"# the {protocol} protocol's"
    assert named_protocols(source, f"x = 1\n{line}\n{protocol}s = 2\n") == [line]


# ---- circles ---------------------------------------------------------------------------------------------------------


def module_graph() -> dict[str, set[str]]:
    """The imports of each module of the server. Files .py, .pyx, .pxd and .pyi of one name are one module."""
    graph: dict[str, set[str]] = {}
    for source in sources():
        if not source.startswith(("client/", "cli/")):
            found = imported(source, (PACKAGE / source).read_text("utf-8"))
            graph.setdefault(module_of(source), set()).update(found)
    return {module: {other for other in found if other in graph} - {module} for module, found in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of two or more modules each of which imports all others, directly or not."""

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        ahead = [module]
        while ahead:
            new = graph[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    beyond = {module: reached(module) for module in graph}
    alike = {frozenset(other for other in beyond[module] if module in beyond[other]) for module in graph}
    return [set(circle) for circle in alike if circle]


def test_no_modules_of_the_server_import_each_other() -> None:
    """Not for a type checker either: both then use the contract."""
    graph = module_graph()
    assert "counterd.contract" in graph["counterd.net.server"]
    assert circles(graph) == []


def test_circular_imports_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}) in (
        [{"a", "b"}, {"c", "d"}], [{"c", "d"}, {"a", "b"}],
    )  # fmt: skip
    graph = module_graph()
    graph["counterd.control.files"].add("counterd.control.config.loading")
    assert circles(graph) == [{"counterd.control.files", "counterd.control.config.loading"}]


# ---- planted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text", "wrong"),
    [
        ("net/x.py", "import counterd.control.config", "floor 4"),
        ("net/x.py", "from counterd.control import config", "floor 4"),
        ("net/x.py", "if True:\n    from counterd.cli import daemon", "floor 5"),
        ("net/x.py", "from counterd.protocols.counter import wire", "a protocol"),
        ("net/x.py", "from counterd.client import Client", "floor 5"),
        ("net/x.pyx", "from counterd.protocols.counter._store cimport CounterStore", "a protocol"),
        ("net/x.pyx", "cimport counterd.protocols.counter._store as protocol", "a protocol"),
        ("protocols/counter/x.pyx", "from counterd.net cimport driver", "floor 3"),
        ("protocols/counter/x.pyx", "import time", "below net"),
        ("protocols/counter/x.pyx", "from posix.time cimport clock_gettime", "below net"),
        ("protocols/counter/x.py", "import asyncio", "below net"),
        ("protocols/counter/x.py", "import os", "below net"),
        ("protocols/other/x.py", "from counterd.protocols.counter import wire", "a protocol"),
        ("protocols/counter/wire.py", "from counterd._core import siphash", "compiled"),
        ("_core.pxd", "from counterd.protocols.counter cimport _store", "floor 2"),
        ("protocols/counter/errors.py", "from counterd._core import siphash", "compiled"),
        ("errors.py", "from counterd import _core", "floor 1"),
        ("contract.py", "from counterd._core import Store", "floor 1"),
        ("contract.py", "from counterd.extensions.host import PluginHost", "floor 5"),
        ("control/x.py", "from counterd.extensions.host import PluginHost", "floor 5"),
        ("extensions/x.py", "from counterd.client import Client", "side"),
        ("tables.py", "from counterd.protocols.counter import TABLES", "floor 2"),
        ("contract.py", "import asyncio", "below net"),
        ("cli/x.py", "from counterd.protocols.counter import PROTOCOL", "a protocol"),
        ("cli/ctl/x.py", "from counterd.protocols.counter.wire import PORT", "a protocol"),
        ("cli/ctl/counter.py", "from counterd.protocols.counter import PROTOCOL", "a protocol"),
        ("client/x.py", "from counterd.net.sockets import open_tcp", "side"),
        ("client/x.py", "from counterd.protocols.counter._store import CounterStore", "side"),
        ("bench/x.pyx", "from counterd._core cimport Session", "side"),
        ("bench/x.py", "from counterd.protocols.counter import wire", "side"),
        ("bench/x.py", "from counterd.bench.dialects.counter import DIALECT", "side"),
        ("bench/dialects/counter.py", "from counterd.protocols.counter import PROTOCOL", "side"),
        ("bench/dialects/_counter.pyx", "from counterd.protocols.throttr import wire", "side"),
        ("bench/dialects/counter.py", "from counterd.bench.dialects import throttr", "side"),
        ("protocols/counter/x.py", "from counterd.bench.dialects.counter import DIALECT", "floor 5"),
        ("admin/x.py", "from counterd.control.inspector import Inspector", "side"),
        ("admin/x.py", "from counterd.protocols.counter import wire", "side"),
        ("control/x.py", "from counterd.admin import link", "floor 5"),
    ],
)
def test_forbidden_imports_are_found(source: str, text: str, wrong: str) -> None:
    assert len(found := wrong_imports(source, text)) == 1
    assert wrong in found[0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("net/x.pyx", "from counterd._core cimport (\n    Session, Store,\n)"),
        ("control/x.py", "from counterd.net import sockets\nfrom counterd.protocols import find_protocols\nimport os"),
        ("protocols/counter/x.py", "from counterd.protocols.counter import wire\nfrom counterd.settings import size"),
        ("client/x.py", "from counterd.protocols.counter.wire import Status\nimport socket"),
        ("bench/x.pyx", "from counterd.net.clock cimport monotonic_ns\nfrom counterd.bench.plan import Plan"),
        ("protocols/counter/x.py", "from counterd.contract import ProtocolSpec\nfrom counterd.tables import Table"),
        ("protocols/counter/errors.py", "from counterd.errors import ServerError\nimport enum"),
        ("bench/dialects/counter.py", "from counterd.protocols.counter import wire\nimport counterd.bench.dialect, os"),
        ("bench/dialects/_counter.pyx", "from counterd.bench.dialects.counter import DIALECT"),
        ("client/x.py", "from counterd.protocols.counter.errors import Refused"),
        ("cli/x.py", "from counterd.client import Client"),
        ("cli/ctl/counter.py", "from counterd.protocols.counter.wire import PORT"),
        ("admin/x.py", "from counterd.protocols import find_protocols\nfrom counterd.ipc import frame"),
    ],
)
def test_allowed_imports_are_not_reported(source: str, text: str) -> None:
    assert wrong_imports(source, text) == []
