"""What the process has left once it serves: no capability, for any of its threads, and no way to new ones."""

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
    """The lines of /proc/PID/task/TID/status, of each thread."""
    threads = Path(f"/proc/{counterd.pid}/task").iterdir()
    return [dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines()) for thread in threads]


@needs_root
@pytest.mark.parametrize("user", ["nobody", ""])
def test_nothing_is_left_of_root(start: Callable[..., daemon.Daemon], user: str) -> None:
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
def test_whoever_has_little_gives_up_the_rest(start: Callable[..., daemon.Daemon]) -> None:
    """Without CAP_SETPCAP the bounding set stays, and no_new_privs makes that of no use."""
    poor = "import ctypes\nassert ctypes.CDLL(None).prctl(28, 1, 0, 0, 0) == 0"  # PR_SET_SECUREBITS, SECBIT_NOROOT
    counterd = start(program=daemon.after(poor))
    for status in left(counterd):
        assert {status[name] for name in SETS if name != "CapBnd"} == {"0" * 16}
        assert status["CapBnd"] != "0" * 16
        assert status["NoNewPrivs"] == "1"


@needs_root
def test_a_crash_leaves_what_the_limit_allows(start: Callable[..., daemon.Daemon]) -> None:
    """The kernel forbids core dumps of whoever changes its user, and shows its /proc to root only."""
    counterd = start({"user": "nobody"})
    assert Path(f"/proc/{counterd.pid}/environ").stat().st_uid == pwd.getpwnam("nobody").pw_uid


@needs_root
def test_a_key_that_cannot_be_read_again(start: Callable[..., daemon.Daemon], tmp_path: Path) -> None:
    """Root reads it at the start, and nobody will not."""
    both = tmp_path / "both.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(both))
    both.chmod(0o600)
    counterd = start({"user": "nobody", "counter.tls.cert": both})
    nobody = pwd.getpwnam("nobody").pw_uid
    assert counterd.lines(
        rf"WARN.*counter\.tls\.cert: uid {nobody} cannot read {both}, so the next reload will be refused$"
    )
