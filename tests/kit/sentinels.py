"""Runs the real counterd with rules of the sentinel protocol."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kit.daemon import Address, Daemon


def flow(flow_id: int, count: float, *, grade: int = 0, **more: Any) -> dict[str, Any]:
    """Makes a rule for `count` tokens, or for a rate if grade is 1. more: of its clusterConfig."""
    config = {"flowId": flow_id, "thresholdType": 1, **more}
    resource = f"resource {flow_id}"
    return {"resource": resource, "count": count, "grade": grade, "clusterMode": True, "clusterConfig": config}


def param(flow_id: int, count: float, **more: Any) -> dict[str, Any]:
    """Makes a rule for `count` calls with each value."""
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
    """Returns the settings of a daemon with sentinel and these rules. more: sentinel.NAME = value."""
    directory.mkdir(exist_ok=True)
    (directory / "rules.json").write_text(json.dumps(rules))
    own = {"enable": "true", "port": "0", "bind": "127.0.0.1", "rules": str(directory / "rules.json"), **more}
    return {f"sentinel.{name}": value for name, value in own.items()}


def address(running: Daemon) -> Address:
    """Returns the address of the sentinel protocol."""
    return running.address_of("sentinel")


@contextlib.contextmanager
def running(directory: Path, rules: Mapping[str, Any], **more: Any) -> Iterator[tuple[Daemon, Address]]:
    """Runs a counterd during the block. Yields it and the address of the sentinel protocol."""
    with daemon.running(directory, settings(directory, rules, **more)) as started:
        yield started, address(started)
