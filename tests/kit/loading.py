"""Runs counterbench for the tests, in a separate process that can be interrupted, limited and waited for."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.process
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterd.bench import result
from counterd.bench.connection import LoadError
from counterd.bench.options import Hold, Keys
from counterd.bench.plan import Plan, read_work
from counterd.bench.run import run
from kit import needs
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Processes are forked from one that has imported everything and has no threads. Starting an interpreter for each run
# would take longer than most runs.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["counterd.bench.run", "pytest", "kit.loading"])


class Bench:
    """A run in progress. pid: of its main process."""

    def __init__(self, process: multiprocessing.process.BaseProcess, directory: Path) -> None:
        assert process.pid is not None
        self.process = process
        self.pid = process.pid
        self._directory = directory

    def load_pids(self) -> list[int]:
        """Returns the pids of its load processes."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        os.kill(self.pid, number)

    def ended(self, status: int, seconds: float = PATIENCE) -> str:
        """Waits until it has ended, and checks the exit status. Returns its stderr."""
        self.process.join(seconds)
        said = (self._directory / "stderr").read_text()
        assert self.process.exitcode == status, said
        return said

    def said(self) -> str:
        """Waits until it has failed. Returns its stderr."""
        return self.ended(1)

    def result(self, seconds: float = PATIENCE) -> result.Run:
        """Waits until it has ended. Returns its result."""
        assert self.ended(0, seconds) == ""
        (run,) = result.load(self._directory / "result").runs
        return run


@contextlib.contextmanager
def running(plan: Plan, patches: Mapping[str, Any] | None = None, limit: int = 0) -> Iterator[Bench]:
    """Starts a run, and ends it after the block. patches: {full name of a constant: value}. limit: of open files."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        process = FORKS.Process(target=_work, args=(plan, patches or {}, limit, directory))
        process.start()
        try:
            yield Bench(process, directory)
        finally:
            if process.is_alive():
                process.kill()
            process.join()


def _work(plan: Plan, patches: Mapping[str, Any], limit: int, directory: Path) -> None:
    """Does a run, in the separate process."""
    with (directory / "stderr").open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    for name, value in {"counterd.bench.run.LOOK_S": 0.005, **patches}.items():
        module, _, variable = name.rpartition(".")
        setattr(importlib.import_module(module), variable, value)
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        report = result.Report([run(plan)], machine={}, versions={})
    except LoadError as error:
        sys.exit(f"LoadError: {error}")
    result.save(report, directory / "result")


def plan_of(server: Any, **options: Any) -> Plan:
    """Makes a plan for a server that has `address` or `path`. Options of the command line may be given as text."""
    for name, read in {"work": read_work, "keys": Keys.read, "hold": Hold.read}.items():
        if isinstance(options.get(name), str):
            options[name] = read(options[name])
    options.setdefault("connections", 2)
    if "requests" in options:
        options.setdefault("duration", None)
    if getattr(server, "path", None) and "port" not in options:
        return Plan(socket=server.path, **options)
    host, port = server.address
    return Plan(**{"host": host, "port": port, **options})


def load(
    server: Any,
    *,
    patches: Mapping[str, Any] | None = None,
    limit: int = 0,
    seconds: float = PATIENCE,
    **options: Any,
) -> result.Run:
    """Does a whole run. Returns its result."""
    with running(plan_of(server, **options), patches, limit) as bench:
        return bench.result(seconds)


def load_fails(server: Any, patches: Mapping[str, Any] | None = None, limit: int = 0, **options: Any) -> str:
    """Does a run that fails. Returns its stderr."""
    with running(plan_of(server, **options), patches, limit=limit) as bench:
        return bench.said()


def wait_for_loads(bench: Bench, count: int) -> list[int]:
    wait_until(lambda: len(bench.load_pids()) == count, f"{count} load processes")
    return bench.load_pids()


class Place:
    """A server on a Unix socket."""

    def __init__(self, path: str) -> None:
        self.path = path


@contextlib.contextmanager
def other_server(protocol: str, directory: Path) -> Iterator[Place]:
    """Runs a real redis or memcached on a Unix socket during the block."""
    path = str(directory / "s")
    program = needs.path({"redis": "redis-server", "memcached": "memcached"}[protocol])
    options = {"redis": ["--port", "0", "--unixsocket", path, "--save", ""],
               "memcached": ["-s", path, "-u", "root"]}[protocol]  # fmt: skip
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(Path(path).is_socket, f"{program} listens")

            yield Place(path)
        finally:
            process.terminate()
