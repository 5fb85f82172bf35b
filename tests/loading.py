"""Runs counterbench for the tests: in a process of its own, which can be interrupted, limited and waited for."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterd.bench import result
from counterd.bench.plan import Hold, Keys, Plan, Work
from daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAM = Path(__file__).parent / "functional" / "bencher.py"


class Bench:
    """A run that goes on. pid: of the process that watches over it."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._path = path

    def load_pids(self) -> list[int]:
        """Its load processes."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def said(self, seconds: float = PATIENCE) -> str:
        """Waits until it has ended without a result, and returns its last words."""
        _, error = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 1, error
        return error.decode()

    def result(self, seconds: float = PATIENCE) -> result.Run:
        """Waits until it has ended."""
        _, error = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, error.decode()
        assert not error, error.decode()
        (run,) = result.load(self._path).runs
        return run


@contextlib.contextmanager
def running(plan: Plan, patches: Mapping[str, Any] | None = None, limit: int = 0) -> Iterator[Bench]:
    """While the block runs. patches: {full name of a constant: value}. limit: of open files."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        job = {"plan": plan, "patches": patches or {}, "limit": limit, "result": path}
        with subprocess.Popen(
            [sys.executable, PROGRAM], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
        ) as process:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(job))
            process.stdin.close()
            process.stdin = None
            try:
                yield Bench(process, path)
            finally:
                if process.poll() is None:
                    process.kill()


def plan_of(server: Any, **options: Any) -> Plan:
    """A plan for a server that has `address` or `path`. Options that people write as text may be given as text."""
    for name, kind in {"work": Work, "keys": Keys, "hold": Hold}.items():
        if isinstance(options.get(name), str):
            options[name] = kind.read(options[name])
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
    """One whole run."""
    with running(plan_of(server, **options), patches, limit) as bench:
        return bench.result(seconds)


def load_fails(server: Any, limit: int = 0, **options: Any) -> str:
    """What a run says that cannot be."""
    with running(plan_of(server, **options), limit=limit) as bench:
        return bench.said()


def wait_for_loads(bench: Bench, count: int) -> list[int]:
    wait_until(lambda: len(bench.load_pids()) == count, f"{count} load processes")
    return bench.load_pids()
