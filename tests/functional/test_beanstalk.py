"""The beanstalk protocol in a real counterd: settings, large jobs and signals."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

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

LARGE = 100 << 20


def stats(peer: Peer) -> dict[str, str]:
    return wire.read_dictionary(peer.ask(wire.stats()).body)


def test_stats_has_both_versions(tmp_path: Path) -> None:
    with daemon.running(tmp_path, ALONE) as counterd, counterd.connect() as connected:
        lines = Peer(connected).ask(wire.stats()).body.decode().splitlines()
        assert 'version: "1.13"' in lines
        assert f'counterd-version: "{__version__}"' in lines


@pytest.mark.parametrize("has_journal", [False, True])
def test_a_large_job_from_put_to_delete(tmp_path: Path, has_journal: bool) -> None:
    """Also across a restart; its memory is free afterwards."""
    journal = {"beanstalk.journal": tmp_path / "jobs"} if has_journal else {}
    largest = "256M" if has_journal else "1G"
    settings = {**ALONE, **journal, "beanstalk.max_job_size": largest}
    body = b"0123456789abcdef" * (LARGE >> 4)
    with daemon.running(tmp_path / "d", settings) as counterd, counterd.connect() as connected:
        peer = Peer(connected)
        assert peer.ask(wire.put(b"small")).status is Status.INSERTED
        before = counterd.rss()
        assert peer.ask(wire.put(body, priority=0)).status is Status.INSERTED
        if not has_journal:
            taken = peer.ask(wire.reserve())
            assert (taken.number, taken.body == body) == (2, True)
            assert peer.ask(wire.delete(2)).status is Status.DELETED
            assert int(counterd.status("VmHWM").split()[0]) * 1024 - before < 5 * LARGE
    if has_journal:
        with daemon.running(tmp_path / "d", settings) as counterd, counterd.connect() as connected:
            peer = Peer(connected)
            assert counterd.lines("restored 2 records")
            taken = peer.ask(wire.reserve())
            assert (taken.number, taken.body == body) == (2, True)


def test_the_largest_job_size_with_a_journal(tmp_path: Path) -> None:
    config = tmp_path / "counterd.conf"
    config.write_text(daemon.config_text({**ALONE, "beanstalk.journal": "/jobs", "beanstalk.max_job_size": "1G"}))
    ended = daemon.run("--check", "-c", config)
    said = "beanstalk.max_job_size: with beanstalk.journal at most 268435456 is possible, not 1073741824"
    assert (ended.returncode, ended.stderr) == (2, f"{config}:6: {said}\n")
    for allowed in ({"beanstalk.journal": "/jobs", "beanstalk.max_job_size": "256M"}, {"beanstalk.max_job_size": "1G"}):
        config.write_text(daemon.config_text({**ALONE, **allowed}))
        assert daemon.run("--check", "-c", config).returncode == 0


def test_sigusr1_begins_the_drain_mode_if_configured(tmp_path: Path) -> None:
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
