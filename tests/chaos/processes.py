"""The client processes of chaos: one in each slot. A killed one is replaced by another in its slot."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos.clients import IDS, Plan
from chaos.dialect import JOBS
from kit import daemon
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chaos.world import World

CLIENTS = Path(__file__).with_name("clients.py")
SLOTS = (
    ("counter", "unix"), ("counter", "unix"), ("counter", "loopback"), ("counter", "far"), ("counter", "far"),
    ("throttr", "unix"), ("throttr", "loopback"), ("throttr", "far"),
    ("sentinel", "unix"), ("sentinel", "loopback"), ("sentinel", "far"),
    ("beanstalk", "unix"), ("beanstalk", "loopback"), ("beanstalk", "far"),
    (JOBS, "unix"), (JOBS, "far"),
    ("smockron", "unix"), ("smockron", "loopback"), ("smockron", "far"),
    ("smockron-control", "unix"), ("smockron-control", "far"),
)  # fmt: skip


class Slot(NamedTuple):
    dialect: str
    place: str


class Worker:
    """One client process. said: the lines that it has written."""

    def __init__(self, number: int, slot: Slot, command: Sequence[str]) -> None:
        self.number = number
        self.slot = slot
        self.said: list[list[Any]] = []
        self.killed_ns: int | None = None
        self.was_stopped = False
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, *words: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.killed_ns = time.monotonic_ns()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def claim_alive(self) -> None:
        """Fails if it has ended: it may only end when it is killed."""
        assert self.process.poll() is None, f"client process {self.number} ended with {self.process.returncode}"

    def has_said(self, word: str) -> bool:
        self.claim_alive()
        return [word] in list(self.said)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(json.loads(line))


class ClientProcesses:
    """All client processes. gone: those that were killed in this round."""

    def __init__(self, world: World, seed: str, slots: Sequence[Slot]) -> None:
        self.world = world
        self.seed = seed
        self.slots = slots
        self.workers: list[Worker] = []
        self.gone: list[Worker] = []
        self._round: tuple[Any, ...] = ()
        self._count = 0

    @property
    def all(self) -> Iterator[Worker]:
        """Those that have run in this round."""
        yield from self.workers
        yield from self.gone

    def let_in(self, dialect: str) -> list[int]:
        """The clients of a protocol that the server has admitted in this round. Other threads may call it."""
        workers = {worker for worker in (*self.gone, *self.workers) if worker.slot.dialect == dialect}
        return sorted(line[1] for worker in workers for line in list(worker.said) if line[0] == "here")

    def begin(self, number: int, directory: Path) -> None:
        """Starts the work of all, after replacing those that were killed in the last round."""
        self.gone = []
        self._round = ("round", number, str(directory))
        self.workers = [
            worker if worker.killed_ns is None else self._start(place) for place, worker in enumerate(self.workers)
        ] or [self._start(place) for place in range(len(self.slots))]
        for worker in self.workers:
            worker.said.clear()
            worker.was_stopped = False
            worker.tell(*self._round)

    def tell(self, slot: int, *words: Any) -> None:
        self.workers[slot].tell(*words)

    def stop(self, slot: int) -> Worker:
        worker = self.workers[slot]
        worker.was_stopped = True
        worker.send_signal(signal.SIGSTOP)
        return worker

    def replace(self, slot: int) -> None:
        """Kills one, and starts another in its slot."""
        self.workers[slot].claim_alive()
        self.workers[slot].kill()
        self.gone.append(self.workers[slot])
        self.workers[slot] = self._start(slot)
        self.workers[slot].tell(*self._round)

    def greet(self) -> None:
        """Each opens one more connection, which shows that the daemon still admits them at all of its addresses."""
        for worker in self.workers:
            worker.tell("greet")
        for worker in self.workers:
            wait_for(worker, "greeted")

    def leave(self, dying: int) -> None:
        """All end their work, one of them because it is killed."""
        self.workers[dying].claim_alive()
        self.workers[dying].kill()
        leaving = [worker for worker in self.workers if worker.killed_ns is None]
        for worker in leaving:
            worker.tell("leave")
        for worker in leaving:
            wait_for(worker, "left")

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _start(self, place: int) -> Worker:
        self._count += 1
        slot = Slot(*self.slots[place])
        plan = Plan(slot.dialect, self.world.addresses[slot], self.seed, place, self._count)
        words = self.world.words(slot.place)
        return Worker(self._count, slot, [*words, sys.executable, str(CLIENTS), json.dumps(plan._asdict())])


def wait_for(worker: Worker, word: str) -> None:
    what = f"client process {worker.number}, {worker.slot.dialect} {worker.slot.place}, has {word}"
    daemon.wait_until(lambda: worker.has_said(word), what, LONG_S)


def worker_of(client: int) -> int:
    """The number of the process that a client belongs to."""
    return client // IDS
