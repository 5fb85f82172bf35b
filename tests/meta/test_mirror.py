"""tests/unit has the tree of src/counterd, tests/benchmarks that of benchmarks, so the place of each test is clear."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "counterd"
UNIT = ROOT / "tests" / "unit"
BENCHMARKS = ROOT / "benchmarks"

# Modules without a test file of their own, and where they are tested instead, or why they are not.
ELSEWHERE = {
    "admin/__main__.py": "is a process: tests/functional/test_admin.py",
    "__main__.py": "one call; tests/kit/daemon.py starts every daemon through it",
    "__init__.py": "the end of tests/unit/test_errors.py",
    "engine/byteorder.pxd": "inlined everywhere; tests/unit/protocols/counter/test_session.py compares byte by byte",
    "engine/audit.pxd": "part of every store: tests/unit/protocols/counter/test_counters.py calls it after every step",
    "protocols/counter/_audits.pxd": "tests/property/test_takes_model.py calls it after every step",
    "protocols/counter/_rates.pxd": "inlined in _store.pyx: tests/unit/protocols/counter/test_takes.py",
    "protocols/counter/_charges.pxd": "inlined: tests/unit/protocols/counter/test_takes.py",
    "protocols/counter/_shares.pxd": "inlined: tests/unit/protocols/counter/test_leased_limits.py",
    "protocols/counter/_leases.pxd": "inlined: tests/unit/protocols/counter/test_leased_limits.py",
    "protocols/counter/_items.pxd": "inlined: tests/unit/protocols/counter/test_takes.py, test_limits.py",
    "client/counter/_taking.py": "of both shapes: tests/functional/test_client_queue.py",
    "client/counter/_holds.py": "of both shapes: tests/unit/client/test_client.py, test_aio.py, tests/scenarios",
    "protocols/beanstalk/_audits.pxd": "tests/property/test_beanstalk_model.py calls it after every step",
    "engine/connections.pxd": "numbers of connections: tests/unit/test_core.py",
    "engine/gcra.pxd": "inlined in protocols/smockron/_store: tests/property/test_smockron_model.py reckons exactly",
    "engine/idle_ring.pxd": "idle counters: tests/unit/protocols/counter/test_counters.py",
    "engine/permits.pxd": "the ledger and the give-back: tests/unit/protocols/counter/test_counters.py",
    "engine/pool.pxd": "cells of every part: tests/unit/protocols/counter/test_counters.py",
    "engine/region.pxd": "the list that _core.pyx maps: tests/unit/test_core.py",
    "engine/debug.pxd": "switches assertions on in the debug build, which runs all tests",
    "bench/_load.pyx": "is a process: tests/functional/test_counterbench.py, test_counterbench_faults.py beside it",
    "bench/_tls.pyx": "a connection of _load.pyx: the end of tests/functional/test_counterbench.py",
    "bench/_codec.pyx": "a part of _load.pyx: tests/functional/test_counterbench.py reads what is sent",
    "bench/_jobs.pyx": "a part of _load.pyx: tests/functional/test_counterbench_beanstalk.py",
    "bench/_ledger.pyx": "a part of _load.pyx: tests/functional/test_counterbench_faults.py breaks its promises",
    "bench/_lines.pxd": "inlined in codecs: tests/functional/test_counterbench_faults.py has replies that cannot be",
    "bench/_link.pxd": "structures of _load.pyx: tests/functional/test_counterbench.py",
    "bench/_permits.pyx": "a part of _load.pyx: tests/functional/test_counterbench.py, test_counterbench_sentinel.py",
    "bench/_task.pyx": "a part of _load.pyx: tests/functional/test_counterbench.py, test_counterbench_throttr.py",
    "bench/_words.pxd": "inlined everywhere in bench: tests/functional/test_counterbench.py reads what is sent",
    "bench/_work.pyx": "a part of _load.pyx: tests/functional/test_counterbench_smockron.py",
    "bench/_memory.pxd": "room of _load.pyx: pipelines and holds in tests/functional/test_counterbench.py",
    "bench/_random.pxd": "the names of tests/functional/test_counterbench.py are compared with the laws",
    "bench/_system.pxd": "declarations, used by tests/functional/test_counterbench.py",
    "bench/options.py": "what a Plan is made of: tests/unit/bench/test_plan.py reads each kind of option",
    "bench/run.py": "starts processes: tests/functional/test_counterbench.py",
    "net/kernel.pxd": "declarations: tests/unit/net/test_poller.py and tests/unit/net/test_connection.py use them all",
    "net/clock.pxd": "one system call: whatever is timed in tests/functional/test_slow_readers.py",
    "version.py": "one constant",
    "journal/__main__.py": "is a process: tests/functional/test_beanstalk_journal.py",
    "cli/journal.py": "looks into files of real daemons: tests/functional/test_beanstalk_journal.py",
    "cli/bench.py": "is a process: tests/functional/test_counterbench_command.py",
    "cli/daemon.py": "is a process: tests/functional/test_start.py",
    "control/process/daemon.py": "is a process: tests/functional/test_start.py, test_reload.py, test_drain.py",
    "control/process/privileges.py": "changes the process for good: tests/functional/test_privileges.py",
    "control/parts.py": "declarations: each part of a service has its own tests",
    "control/service.py": "real sockets: tests/functional/test_start.py and tests/functional/test_reload.py",
    "client/_tasks.py": "a base: tests/unit/client/test_aio.py and tests/functional/test_aio_sentinel.py",
    "client/_threads.py": "a base: tests/functional/test_client_lost.py and tests/functional/test_client_fallback.py",
    "client/_connecting.py": "a base: tests/unit/client/test_aio.py and tests/functional/test_client_lost.py",
    "client/smockron/_aio.py": "the second shape of tests/unit/client/smockron/test_smockron.py",
    "client/smockron/_base.py": "a base: tests/unit/client/smockron/test_smockron.py",
    "client/smockron/_delays.py": "part of the core: tests/unit/client/smockron/test_gatekeeping.py",
    "client/smockron/_identify.py": "of both middlewares: tests/unit/client/test_smockron_asgi.py",
    "client/smockron/_masters.py": "part of the core: tests/unit/client/smockron/test_gatekeeping.py",
    "client/smockron/_sockets.py": "the thread of a gatekeeper: tests/unit/client/smockron/test_smockron.py",
    "client/smockron_wsgi.py": "the second shape of tests/unit/client/test_smockron_asgi.py",
    "cli/ctl/smockron/serving.py": "is a process: tests/functional/test_gate.py",
    "cli/ctl/smockron/__init__.py": "asks a real master: tests/functional/test_counterctl_smockron.py",
    "client/throttr/_keys.py": "the methods of both clients: tests/unit/client/throttr/test_throttr.py",
    "client/counter/__init__.py": "the client of the package: tests/unit/client/test_client.py",
    "client/_holding.py": "the base of what is asked for: tests/unit/client/counter/test_asked.py",
    "client/beanstalk/_worker.py": "is tried with servers: tests/functional/test_client_beanstalk.py",
    "client/beanstalk/__init__.py": "is tried with servers: tests/functional/test_client_beanstalk.py",
    "client/sentinel/__init__.py": "tests/functional/test_client_sentinel.py and tests/functional/test_aio_sentinel.py",
    "protocols/sentinel/_calls.py": "two tuples: tests/unit/protocols/sentinel/test_extending.py has both",
    "protocols/sentinel/__init__.py": "a declaration: tests/unit/control/config/test_loading.py reads files with it",
    "protocols/beanstalk/__init__.py": "a declaration: tests/unit/control/config/test_loading.py reads files with it",
    "protocols/beanstalk/_documents.pyx": "statistics: tests/unit/protocols/beanstalk/test_session.py, test_groups.py",
    "protocols/beanstalk/_jobs.pxd": "inlined in _store: tests/property/test_beanstalk_model.py, with audits",
    "protocols/beanstalk/_queues.pxd": "inlined in _store: tests/property/test_beanstalk_model.py, with audits",
    "protocols/beanstalk/_replies.pxd": "inlined in _session: the vectors compare byte by byte",
    "protocols/beanstalk/_tubes.pxd": "inlined in _store: tests/property/test_beanstalk_model.py, with audits",
    "protocols/beanstalk/_workers.pxd": "inlined in _store: tests/property/test_beanstalk_model.py, with audits",
    "protocols/counter/_messages.pxd": "inlined in _session: tests/unit/protocols/counter/test_session.py",
    "protocols/counter/_store.pyx": "around the counters: tests/unit/protocols/counter/test_counters.py",
    "protocols/sentinel/_audits.pxd": "inlined in _store: tests/property/test_sentinel_model.py calls it",
    "protocols/sentinel/_messages.pxd": "inlined in _session: the vectors compare byte by byte",
    "protocols/sentinel/_tokens.pxd": "inlined in _store: tests/property/test_sentinel_model.py, with audits",
    "protocols/sentinel/_window.pxd": "inlined in _rates: tests/property/test_sentinel_model.py, with audits",
    "protocols/sentinel/extensions.py": "with the store: tests/unit/protocols/sentinel/test_extending.py",
    "protocols/smockron/__init__.py": "a declaration: tests/unit/control/config/test_loading.py reads files with it",
    "protocols/smockron/errors.py": "what a gatekeeper raises: tests/unit/client/smockron/test_gatekeeping.py",
    "protocols/smockron/_throttles.pxd": "inlined in _store: tests/property/test_smockron_model.py, with audits",
    "protocols/throttr/__init__.py": "a declaration: tests/unit/control/config/test_loading.py reads files with it",
    "protocols/throttr/_channels.pxd": "inlined in _session: tests/property/test_throttr_model.py, with audits",
    "protocols/throttr/_keys.pxd": "inlined in _store and _session: tests/property/test_throttr_model.py, with audits",
    "protocols/throttr/_members.pxd": "inlined in _session: tests/unit/protocols/throttr/test_store.py, with audits",
    "protocols/counter/__init__.py": "a declaration: tests/unit/control/config/test_loading.py reads files with it",
}


def has_code(path: Path) -> bool:
    """Whether a module has more than a docstring and imports that pass names on."""
    if path.suffix != ".py":
        return True
    body = ast.parse(path.read_text("utf-8")).body
    statements = [node for node in body[1:] if not isinstance(node, (ast.Import, ast.ImportFrom))]
    return any(not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__") for node in statements)


@functools.cache
def modules() -> list[str]:
    """The package's modules, relative to it. A .pxd that belongs to a .pyx is the same module."""
    found = [path for pattern in ("*.py", "*.pyx", "*.pxd") for path in PACKAGE.rglob(pattern)]
    own = (path for path in found if path.suffix != ".pxd" or not path.with_suffix(".pyx").exists())
    return sorted(path.relative_to(PACKAGE).as_posix() for path in own if has_code(path))


def mirrored(module: str) -> str:
    """The test file of a module: _core.pyx -> test_core.py; net/server.py -> net/test_server.py; client/__init__.py ->
    client/test_client.py.
    """
    path = Path(module)
    name = path.parent.name if path.stem == "__init__" else path.stem.strip("_")
    return (path.parent / f"test_{name}.py").as_posix()


@pytest.mark.parametrize("module", [module for module in modules() if module not in ELSEWHERE])
def test_every_module_has_its_tests_in_the_mirrored_place(module: str) -> None:
    assert (UNIT / mirrored(module)).exists()


@pytest.mark.parametrize("test", sorted(path.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")))
def test_every_unit_test_is_of_a_module(test: str) -> None:
    assert test in {mirrored(module) for module in modules()}


def test_every_test_of_a_benchmark_is_of_a_file_there() -> None:
    """Most files have none: they are run, and no test decides by time. Their calculations are tested."""
    files = (path for pattern in ("*.py", "*.pyx") for path in BENCHMARKS.rglob(pattern))
    there = {mirrored(path.relative_to(BENCHMARKS).as_posix()) for path in files}
    folder = ROOT / "tests" / "benchmarks"
    tests = {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")}
    assert "test_regress.py" in tests
    assert tests <= there


@pytest.mark.parametrize("module", ELSEWHERE)
def test_every_exception_is_still_needed(module: str) -> None:
    assert module in modules()
    assert not (UNIT / mirrored(module)).exists()
    for named in re.findall(r"tests/[\w/.]+\.py", ELSEWHERE[module]):
        assert (ROOT / named).exists()


def test_the_names_are_mirrored() -> None:
    assert mirrored("_core.pyx") == "test_core.py"
    assert mirrored("net/server.py") == "net/test_server.py"
    assert mirrored("client/__init__.py") == "client/test_client.py"
    assert {"_core.pyx", "net/connection.pyx", "engine/siphash.pxd", "client/__init__.py"} <= set(modules())
    assert not {"_core.pxd", "net/__init__.py"} & set(modules())
