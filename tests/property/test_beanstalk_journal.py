"""Random histories with a journal, cut off at every point of it: what was acknowledged is there, and nothing twice.

The disk is a database in memory. Between two commands a piece is taken, written, reported as written, or refused, or
none of that; and then the process is gone, and another one begins with what the disk has.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.beanstalk import wire
from kit.journaled import Journaled
from kit.machine import examples

if TYPE_CHECKING:
    from kit.pump import Peer

SECOND = 1_000_000_000
STEPS = 60
TUBES = (b"default", b"other")
REPLY = re.compile(rb"(?:(RESERVED|FOUND) \d+ (\d+)\r\n)|([A-Z_]+)(?: ([\w-]+))?\r\n")


@dataclass
class Known:
    """What clients know of jobs, by their bodies: each put has one of its own.

    ids: of those that were acknowledged. ended: ids whose delete was acknowledged. maybe_ended: whose delete was asked.
    buried: ids that were acknowledged as buried and not touched since. seen: all ids that anybody was told.
    """

    ids: dict[bytes, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    maybe_ended: set[int] = field(default_factory=set)
    buried: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)


class Client:
    """A connection, what it asked, in order, and what it was answered."""

    def __init__(self, peer: Peer, known: Known) -> None:
        self.peer = peer
        self.known = known
        self.asked: list[tuple[str, int, bytes]] = []
        self.own: list[int] = []

    def ask(self, kind: str, number: int, body: bytes, command: bytes) -> None:
        self.asked.append((kind, number, body))
        self.peer.send(command)

    def hear(self) -> None:
        """Takes note of what was answered by now."""
        output = bytes(self.peer.output)
        known = self.known
        while output:
            head = REPLY.match(output)
            assert head is not None, output
            end = head.end() + (int(head[2]) + 2 if head[1] else 0)
            kind, number, body = self.asked.pop(0)
            word = (head[1] or head[3]).decode()
            if kind == "put" and word == "INSERTED":
                known.ids[body] = int(head[4])
                known.seen.add(int(head[4]))
            elif kind == "put":
                assert word == "INTERNAL_ERROR"
                known.refused.add(body)
            elif word == "RESERVED":
                number = int(head[0].split()[1])
                known.seen.add(number)
                self.own.append(number)
            elif kind == "delete" and word == "DELETED":
                known.ended.add(number)
            elif kind == "bury" and word == "BURIED":
                known.buried[number] = known.buried.get(number, 0)
            output = output[end:]
        del self.peer.output[:]


def hear(clients: list[Client]) -> None:
    for client in clients:
        client.hear()


def serve(generator: random.Random, clients: list[Client], known: Known, serial: list[int]) -> None:
    """One command of one client."""
    client = generator.choice(clients)
    kind = generator.choice(("put", "put", "put", "reserve", "reserve", "delete", "delete", "release", "bury", "use"))
    if kind == "put":
        serial[0] += 1
        body = b"%d " % serial[0] + b"x" * generator.choice((0, 50, 2000))
        client.ask("put", 0, body, wire.put(body, priority=generator.randrange(3), delay=generator.choice((0, 0, 3))))
    elif kind == "use":
        name = generator.choice(TUBES)
        client.ask("use", 0, b"", wire.use(name))
        client.ask("watch", 0, b"", wire.watch(name))
    elif kind == "reserve":
        client.ask("reserve", 0, b"", wire.reserve(0))
    elif known.seen:
        number = client.own.pop() if client.own and generator.random() < 0.8 else generator.choice(sorted(known.seen))
        known.buried.pop(number, None)
        if kind == "delete":
            known.maybe_ended.add(number)
            client.ask("delete", number, b"", wire.delete(number))
        elif kind == "release":
            client.ask("release", number, b"", wire.release(number, 1, generator.choice((0, 2))))
        else:
            client.ask("bury", number, b"", wire.bury(number, 2))


def work_disk(generator: random.Random, kept: Journaled) -> None:
    """A step of the disk, or none."""
    chance = generator.random()
    if kept.piece is None:
        if chance < 0.6:
            kept.take()
    elif chance < 0.3:
        kept.write()
    elif chance < 0.6:
        kept.write()
        kept.reach()
    elif chance < 0.65:
        kept.refuse()
    elif chance < 0.7:
        kept.fill(is_full=True)
        kept.renew()
    if chance > 0.9:
        kept.fill(is_full=False)


def compare(kept: Journaled, known: Known) -> None:
    """What is there after a restart, beside what clients know."""
    found: dict[bytes, int] = {}
    for id_, body, state, buries in kept.database.execute(
        "SELECT jobs.id, ifnull(jobs.body, bodies.body), state, buries FROM jobs LEFT JOIN bodies USING (id)"
    ):
        assert body not in found, "a job is there twice"
        found[body] = id_
        assert id_ not in known.ended, "a job came back that was acknowledged as deleted"
        if id_ in known.buried:
            assert state == 4
            assert buries > 0
    for body, id_ in known.ids.items():
        assert found.get(body) == id_ or id_ in known.maybe_ended, "an acknowledged job is lost"
    peer = kept.connect()
    for body, id_ in found.items():
        peer.send(wire.peek(id_))
        assert bytes(peer.output) == b"FOUND %d %d\r\n%b\r\n" % (id_, len(body), body)
        del peer.output[:]
    peer.close()


@pytest.mark.parametrize("seed", range(examples(12)))
def test_what_was_acknowledged_outlives_the_process(seed: int):
    for part in range(10):
        generator = random.Random(1000 * seed + part)
        kept, known, serial = Journaled(), Known(), [0]
        for _ in range(3):
            clients = [Client(kept.connect(), known) for _ in range(3)]
            for _ in range(STEPS):
                serve(generator, clients, known, serial)
                hear(clients)
                if generator.random() < 0.5:
                    work_disk(generator, kept)
                    hear(clients)
                if generator.random() < 0.1:
                    kept.bench.advance(int(generator.random() * SECOND))
            kept.bench.store.audit()
            newest = max(known.seen, default=0)
            kept.crash(int(generator.random() * 2 * SECOND))
            compare(kept, known)
            peer = kept.connect()
            peer.send(wire.put(b"new"))
            kept.commit()
            number = int(bytes(peer.output).split()[1])
            assert number > newest, "an id was given again"
            peer.send(wire.delete(number))
            kept.commit()
            peer.close()
