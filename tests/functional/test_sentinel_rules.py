"""The file of rules: read at the start and at each reload, all or nothing, and the errors of a wrong one."""

from __future__ import annotations

import json
import os
import pwd
import signal
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.sentinel.wire import Status
from kit import daemon
from kit.sentinels import SETTINGS, connected, document, flow, write_rules

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.daemon import Daemon

# What the line of sentinel.rules is in a file that begins with SETTINGS.
LINE = len({**daemon.DEFAULTS, **SETTINGS}) + 1


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return write_rules(tmp_path)


@pytest.fixture
def serve(start: Callable[..., Daemon], rules: Path) -> Callable[..., Daemon]:
    """Starts a counterd with the file of rules."""

    def serve(**settings: object) -> Daemon:
        more = {f"sentinel.{name}": value for name, value in settings.items()}
        return start({**SETTINGS, "sentinel.rules": rules, **more})

    return serve


def not_reloaded(counterd: Daemon) -> list[str]:
    """Makes the daemon reload its files, and returns the error that it logs."""
    count = len(counterd.lines("not reloaded"))
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_log("not reloaded", count + 1)
    statistics = len(counterd.lines("stats of sentinel"))
    counterd.send_signal(signal.SIGUSR1)
    counterd.wait_for_log("stats of sentinel", statistics + 1)
    return [line.partition("not reloaded: ")[2] for line in counterd.lines("not reloaded")[count:]]


def again(counterd: Daemon) -> None:
    """Makes the daemon reload its files, which are valid."""
    count = len(counterd.lines(" reloaded "))
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_log(" reloaded ", count + 1)


def test_a_reload_changes_rules_and_keeps_tokens(serve: Callable[..., Daemon], rules: Path) -> None:
    counterd = serve()
    with connected(counterd) as peer:
        token = peer.acquire(3)
        assert token.status == Status.OK
        assert peer.acquire().status == Status.BLOCKED
        rules.write_text(json.dumps(document(concurrent=4)))
        assert peer.acquire().status == Status.BLOCKED, "files are read when they are to be, not when they change"
        again(counterd)
        assert counterd.lines(r"reloaded .*: the file of sentinel\.rules$")
        assert peer.acquire().status == Status.OK
        assert peer.release(token.token_id) == Status.RELEASE_OK


def test_each_mistake_is_logged_and_changes_nothing(serve: Callable[..., Daemon], rules: Path) -> None:
    counterd = serve()
    wrong = document(concurrent=4)
    wrong["shop"]["flowRules"] += [flow(8, -1), flow(7, 1)]
    rules.write_text(json.dumps(wrong))
    text = counterd.config.read_text()
    counterd.config.write_text(text + "sentinel.max_allowed_qps = 7\n")
    where = f'{counterd.config}:{LINE}: sentinel.rules: {rules}: namespace "shop": flowRules'
    first, second = not_reloaded(counterd)
    assert first.startswith(f'{where}[2] (resource "r8"): count: ')
    assert second.startswith(f'{where}[3] (resource "r7"): clusterConfig.flowId: ')
    with connected(counterd) as peer:
        assert peer.acquire(3).status == Status.OK
        assert peer.acquire().status == Status.BLOCKED
    rules.write_text(json.dumps(document(concurrent=9)))
    again(counterd)
    assert counterd.lines(r"reloaded .*: sentinel\.max_allowed_qps, the file of sentinel\.rules$")


def test_a_mistake_in_the_configuration_keeps_the_rules(serve: Callable[..., Daemon], rules: Path) -> None:
    counterd = serve()
    rules.write_text(json.dumps(document(concurrent=1)))
    text = counterd.config.read_text()
    counterd.config.write_text(f"{text}sentinel.tls.cert = {rules}\n")
    assert any("no certificate in PEM" in line for line in not_reloaded(counterd))
    with connected(counterd) as peer:
        assert peer.acquire(3).status == Status.OK
    counterd.config.write_text(text)
    again(counterd)
    with connected(counterd) as peer:
        assert peer.acquire(3).status == Status.BLOCKED


@pytest.mark.parametrize("kind", ["missing", "pipe", "folder", "long", "json"])
def test_an_unreadable_file_of_rules_changes_nothing(serve: Callable[..., Daemon], rules: Path, kind: str) -> None:
    counterd = serve()
    rules.unlink()
    if kind == "pipe":
        os.mkfifo(rules)
    elif kind == "folder":
        rules.mkdir()
    elif kind == "long":
        rules.touch()
        os.truncate(rules, (1 << 25) + 1)
    elif kind == "json":
        rules.write_text('{"shop": {}')
    why = {
        "missing": " cannot be read: No such file or directory",
        "pipe": " is not a regular file",
        "folder": " cannot be read: Is a directory",
        "long": " has more than 33554432 bytes",
        "json": ": line 1, column 12: Expecting ',' delimiter",
    }
    (line,) = not_reloaded(counterd)
    assert line == f"{counterd.config}:{LINE}: sentinel.rules: {rules}{why[kind]}"
    with connected(counterd) as peer:
        assert peer.acquire(3).status == Status.OK


def test_without_a_file_there_are_no_rules(serve: Callable[..., Daemon]) -> None:
    counterd = serve()
    with connected(counterd) as peer:
        token = peer.acquire()
        counterd.reload(SETTINGS)
        assert counterd.lines(r"reloaded .*: sentinel\.rules$")
        assert peer.acquire().status == Status.NO_RULE
        assert peer.release(token.token_id) == Status.NO_RULE
        assert peer.release(token.token_id) == Status.ALREADY_RELEASED


def test_a_mistake_ends_a_start_and_a_check(tmp_path: Path, rules: Path) -> None:
    rules.write_text(json.dumps({"shop": {"flowRules": [{**flow(7, 1), "clusterMode": "yes"}, flow(8, 1, grade=3)]}}))
    config = tmp_path / "F"
    config.write_text(daemon.config_text({**SETTINGS, "sentinel.rules": rules}))
    where = f'{config}:{LINE}: sentinel.rules: {rules}: namespace "shop": flowRules'
    for arguments in (["--check"], []):
        ended = daemon.run("-c", config, *arguments)
        assert ended.returncode == 2
        first, second = ended.stderr.splitlines()
        assert first.startswith(f'{where}[0] (resource "r7"): clusterMode: ')
        assert second.startswith(f'{where}[1] (resource "r8"): grade: ')
    ended = daemon.run("-c", config, "--check", "--set", "sentinel.token_service=nowhere:Tokens")
    assert len(ended.stderr.splitlines()) == 3, "and every other mistake"
    write_rules(tmp_path)
    assert daemon.run("-c", config, "--check").returncode == 0


@pytest.mark.needs("root")
def test_rules_unreadable_for_the_user_warn(start: Callable[..., Daemon], rules: Path) -> None:
    rules.chmod(0o600)
    counterd = start({**SETTINGS, "sentinel.rules": rules, "user": "nobody"})
    nobody = pwd.getpwnam("nobody").pw_uid
    assert counterd.lines(
        rf"WARN.*sentinel\.rules: uid {nobody} cannot read {rules}, so the next reload will be refused$"
    )
    with connected(counterd) as peer:
        assert peer.acquire(3).status == Status.OK
    (line,) = not_reloaded(counterd)
    assert line.endswith("cannot be read: Permission denied")
