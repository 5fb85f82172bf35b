"""Runs the real counterd with rules of the sentinel room."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from daemon import Address, Daemon


def flow(flow_id: int, count: float, *, grade: int = 0, **more: Any) -> dict[str, Any]:
    """A rule of so many tokens, or of a rate if grade is 1. more: of its clusterConfig."""
    config = {"flowId": flow_id, "thresholdType": 1, **more}
    resource = f"resource {flow_id}"
    return {"resource": resource, "count": count, "grade": grade, "clusterMode": True, "clusterConfig": config}


def param(flow_id: int, count: float, **more: Any) -> dict[str, Any]:
    """A rule of so many calls with each value."""
    config = {"flowId": flow_id, "thresholdType": 1, **more}
    return {
        "resource": f"resource {flow_id}",
        "count": count,
        "grade": 1,
        "paramIdx": 0,
        "clusterMode": True,
        "clusterConfig": config,
    }


def settings(directory: Path, rules: Mapping[str, Any], **more: str) -> dict[str, str]:
    """Those of a daemon with this room, and these rules. more: sentinel.NAME = value."""
    directory.mkdir(exist_ok=True)
    (directory / "rules.json").write_text(json.dumps(rules))
    own = {"enable": "true", "port": "0", "bind": "127.0.0.1", "rules": str(directory / "rules.json"), **more}
    return {f"sentinel.{name}": value for name, value in own.items()}


def address(running: Daemon) -> Address:
    """Where it serves this room."""
    return running.served("sentinel listens on")[0]


@contextlib.contextmanager
def running(directory: Path, rules: Mapping[str, Any], **more: Any) -> Iterator[tuple[Daemon, Address]]:
    """A counterd while the block runs, and where its room is."""
    with daemon.running(directory, settings(directory, rules, **more)) as started:
        yield started, address(started)
