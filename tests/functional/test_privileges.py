"""The privileges of the serving process: no capabilities in any thread, and no way to gain new ones."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Callable

needs_root = pytest.mark.needs("root")

SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def left(counterd: daemon.Daemon) -> list[dict[str, str]]:
    """The lines of each thread's /proc/PID/task/TID/status."""
    threads = Path(f"/proc/{counterd.pid}/task").iterdir()
    return [dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines()) for thread in threads]


@needs_root
@pytest.mark.parametrize("user", ["nobody", ""])
def test_no_capabilities_are_left(start: Callable[..., daemon.Daemon], user: str) -> None:
    counterd = start({"user": user} if user else {})
    threads = left(counterd)
    assert len(threads) >= 2, "the one that writes the log is among them"
    uid = str(pwd.getpwnam(user or "root").pw_uid)
    for status in threads:
        assert {status[name] for name in SETS} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert status["Uid"].split() == [uid] * 4
    assert counterd.stats()["internal_errors"] == 0


@needs_root
def test_capabilities_are_dropped_without_cap_setpcap(start: Callable[..., daemon.Daemon]) -> None:
    """The bounding set stays then, and no_new_privs makes it useless."""
    poor = "import ctypes\nassert ctypes.CDLL(None).prctl(28, 1, 0, 0, 0) == 0"  # PR_SET_SECUREBITS, SECBIT_NOROOT
    counterd = start(program=daemon.after(poor))
    for status in left(counterd):
        assert {status[name] for name in SETS if name != "CapBnd"} == {"0" * 16}
        assert status["CapBnd"] != "0" * 16
        assert status["NoNewPrivs"] == "1"


@needs_root
def test_core_dumps_are_possible_after_changing_the_user(start: Callable[..., daemon.Daemon]) -> None:
    """The kernel forbids core dumps of a process that changes its user, and shows its /proc to root only."""
    counterd = start({"user": "nobody"})
    assert Path(f"/proc/{counterd.pid}/environ").stat().st_uid == pwd.getpwnam("nobody").pw_uid


@needs_root
def test_a_key_unreadable_for_the_user_warns(start: Callable[..., daemon.Daemon], tmp_path: Path) -> None:
    """Root reads it at the start, but nobody could not at a reload."""
    both = tmp_path / "both.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(both))
    both.chmod(0o600)
    counterd = start({"user": "nobody", "counter.tls.cert": both})
    nobody = pwd.getpwnam("nobody").pw_uid
    assert counterd.lines(
        rf"WARN.*counter\.tls\.cert: uid {nobody} cannot read {both}, so the next reload will be refused$"
    )
