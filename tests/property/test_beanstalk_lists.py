"""Lists of tubes, which some clients read slowly while others make and end tubes, compared with a model in a dict.

Each list is what existed when the store began it, byte for byte, whatever happens until its last byte is read.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from conformance.beanstalk.engine import make_store
from counterd.protocols.beanstalk import wire
from kit.machine import examples
from kit.pump import START_NS

TUBES = 1500  # at 7 steps each, more than two turns of a list
STEPS = 60


class Lists:
    """A store, its clients, and what each of them has to read. makers: the tubes that each of them watches."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.store: Any = make_store(memory_limit=1 << 24, tubes=2 * TUBES)
        self.makers: dict[Any, list[bytes]] = {self.session(): [b"default"] for _ in range(3)}
        self.needed: Counter[bytes] = Counter()  # how many watch a tube, in the order in which tubes were made
        self.readers: dict[Any, tuple[bytearray, bytes]] = {}
        self.serial = 10

    def session(self) -> Any:
        return self.store.session(START_NS)

    def answer(self, session: Any, command: bytes) -> bytes:
        """The answer to one that reads at once."""
        output: bytes = session.receive(command, START_NS)
        while session.more:
            output += session.take_output(START_NS)
            self.tick()
        return output

    def tick(self) -> None:
        if 0 <= self.store.next_deadline() <= START_NS:
            self.store.tick(START_NS)
        self.store.take_dirty()

    def change(self, maker: Any, count: int) -> None:
        watched = self.makers[maker]
        for _ in range(count):
            if len(watched) > 1 and self.draw.random() < 0.5:
                name = watched.pop(self.draw.randrange(1, len(watched)))
                command = wire.ignore(name)
                self.needed[name] -= 1
                if not self.needed[name]:
                    del self.needed[name]
            else:
                self.serial += self.draw.random() < 0.8  # else one that has existed, and may have ended
                name = b"%d-" % (self.serial - self.draw.choice((0, 0, 9))) + b"x" * self.draw.choice((0, 30, 190))
                if name in watched:
                    continue
                watched.append(name)
                command = wire.watch(name)
                self.needed[name] += 1
            assert self.answer(maker, command) == b"WATCHING %d\r\n" % len(watched)

    def listed(self, names: list[bytes]) -> bytes:
        body = b"".join([b"---\n", *(b"- %b\n" % name for name in names)])
        return b"OK %d\r\n%b\r\n" % (len(body), body)

    def begin(self) -> None:
        session = self.session()
        output = bytearray(session.receive(wire.list_tubes(), START_NS))
        while not output:
            output += session.take_output(START_NS)
        self.readers[session] = output, self.listed([b"default", *self.needed])
        if self.draw.random() < 0.3:
            output += session.eof(START_NS)

    def read(self, session: Any) -> None:
        output, expected = self.readers[session]
        output += session.take_output(START_NS)
        if not session.more:
            del self.readers[session]
            assert output == expected
            session.closed(START_NS)

    def step(self) -> None:
        chance = self.draw.random()
        if chance < 0.2 and len(self.readers) < 8:
            self.begin()
        elif chance < 0.6 and self.readers:
            self.read(self.draw.choice(list(self.readers)))
        elif chance < 0.65 and self.readers:
            session = self.draw.choice(list(self.readers))
            del self.readers[session]
            session.closed(START_NS)
        else:
            self.change(self.draw.choice(list(self.makers)), self.draw.randrange(100))
        if self.draw.random() < 0.5:
            self.tick()
        self.store.audit()


@pytest.mark.parametrize("seed", range(examples(4)))
def test_a_list_is_what_existed_when_it_began(seed: int) -> None:
    lists = Lists(seed)
    for maker in lists.makers:
        lists.change(maker, TUBES)
    for _ in range(STEPS):
        lists.step()
    while lists.readers:
        lists.read(next(iter(lists.readers)))
    for maker, watched in lists.makers.items():
        assert lists.answer(maker, wire.list_tubes_watched()) == lists.listed(watched)
        maker.closed(START_NS)
    while 0 <= lists.store.next_deadline() <= START_NS:
        lists.store.tick(START_NS)
    lists.store.audit()
    assert lists.store.snapshot()["used_memory"] == 248
