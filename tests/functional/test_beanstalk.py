"""The beanstalk protocol of the real counterd: what the daemon around the store has to do with it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.wire import Status
from counterd.version import __version__
from kit import daemon
from kit.jobs import Peer

if TYPE_CHECKING:
    from pathlib import Path

ALONE = {
    "counter.enable": "false",
    "counter.port": "",
    "counter.bind": "",
    "beanstalk.enable": "true",
    "beanstalk.port": "0",
    "beanstalk.bind": "127.0.0.1",
}


def stats(peer: Peer) -> dict[str, str]:
    return wire.read_dictionary(peer.ask(wire.stats()).body)


def test_stats_says_both_versions(tmp_path: Path) -> None:
    with daemon.running(tmp_path, ALONE) as counterd, counterd.connect() as connected:
        lines = Peer(connected).ask(wire.stats()).body.decode().splitlines()
        assert 'version: "1.13"' in lines
        assert f'counterd-version: "{__version__}"' in lines


def test_usr1_begins_the_drain_mode_if_told_so(tmp_path: Path) -> None:
    with daemon.running(tmp_path, ALONE) as counterd, counterd.connect() as one, counterd.connect() as other:
        worker, producer = Peer(one), Peer(other)
        assert producer.ask(wire.put(b"before")).status is Status.INSERTED
        counterd.send_signal(signal.SIGUSR1)
        counterd.wait_for_log("stats of beanstalk")
        assert producer.ask(wire.put(b"still")).status is Status.INSERTED
        counterd.reload({**ALONE, "beanstalk.usr1": "drain"})
        assert stats(producer)["draining"] == "false"
        counterd.send_signal(signal.SIGUSR1)
        counterd.wait_for_log("stats of beanstalk", 2)
        assert len(counterd.lines("drain mode of beanstalk is on: new work is refused")) == 1
        for peer in (worker, producer):
            assert peer.ask(wire.put(b"after")).status is Status.DRAINING
        assert stats(producer)["draining"] == "true"
        taken = worker.ask(wire.reserve(0))
        assert (taken.status, taken.body) == (Status.RESERVED, b"before")
        assert worker.ask(wire.release(taken.number or 0)).status is Status.RELEASED
        assert worker.ask(wire.delete(taken.number or 0)).status is Status.DELETED
