"""Imports each module of the clients, and uses each client once. test_client_alone.py runs it where nothing else is.

Arguments: the folder with the package, and a JSON object: modules, addresses of the protocols, and a flow of sentinel.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback
from typing import Any

TIMEOUT_S = 60.0


def wrong_imports(folder: str, modules: list[str]) -> dict[str, str]:
    """Imports the modules. Returns {file and line that could not be executed: the error}."""
    found = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
            place = f"{ours[-1].filename.removeprefix(folder)}:{ours[-1].lineno}" if ours else module
            found[place] = repr(error)
    return found


# ---- each protocol's clients -----------------------------------------------------------------------------------------


def use_counter(where: list[Any], flow: int) -> None:
    from counterd.client import Client

    with Client(*where, timeout=TIMEOUT_S) as client, client.hold("alone", maximum=1):
        assert client.get("alone") == 1


async def use_counter_async(where: list[Any], flow: int) -> None:
    from counterd.client import AsyncClient

    async with AsyncClient(*where, timeout=TIMEOUT_S) as client, client.hold("alone", maximum=1):
        assert await client.get("alone") == 1


def use_throttr(where: list[Any], flow: int) -> None:
    from counterd.client.throttr import Client

    with Client(*where, timeout=TIMEOUT_S) as client:
        assert client.set("alone", b"value", ttl=60)
        found = client.get("alone")
        assert found is not None
        assert found.value == b"value"


async def use_throttr_async(where: list[Any], flow: int) -> None:
    from counterd.client.throttr import AsyncClient

    async with AsyncClient(*where, timeout=TIMEOUT_S) as client:
        assert await client.set("alone", b"another", ttl=60)
        found = await client.get("alone")
        assert found is not None
        assert found.value == b"another"


def use_sentinel(where: list[Any], flow: int) -> None:
    from counterd.client.sentinel import Client

    with Client(*where, timeout=TIMEOUT_S, fallback="closed") as client, client.hold(flow) as hold:
        assert not hold.lost


async def use_sentinel_async(where: list[Any], flow: int) -> None:
    from counterd.client.sentinel import AsyncClient

    async with AsyncClient(*where, timeout=TIMEOUT_S, fallback="closed") as client, client.hold(flow) as hold:
        assert not hold.lost


def use_beanstalk(where: list[Any], flow: int) -> None:
    from counterd.client.beanstalk import Client

    with Client(*where, timeout=TIMEOUT_S) as client:
        client.put("alone")
        job = client.reserve(0)
        assert job is not None
        assert job.delete()


async def use_beanstalk_async(where: list[Any], flow: int) -> None:
    from counterd.client.beanstalk import AsyncClient

    async with AsyncClient(*where, timeout=TIMEOUT_S) as client:
        await client.put("alone")
        job = await client.reserve(0)
        assert job is not None
        assert await job.delete()


def use_smockron(where: list[Any], flow: int) -> None:
    from counterd.client.smockron import Gatekeeper

    with Gatekeeper(tuple(where), "slow") as client:
        assert client.decide("alone").verdict == "pass"
        assert client.connect(TIMEOUT_S)


async def use_smockron_async(where: list[Any], flow: int) -> None:
    from counterd.client.smockron import AsyncGatekeeper

    async with AsyncGatekeeper(tuple(where), "slow") as client:
        assert client.decide("alone too").verdict == "pass"
        assert await client.connect(TIMEOUT_S)


def main(folder: str, told: dict[str, Any]) -> None:
    elsewhere = [path for path in sys.path if "-packages" in path]
    assert not elsewhere, f"what is installed in {elsewhere} could be imported"
    sys.path.insert(0, folder)
    if wrong := wrong_imports(folder, told["modules"]):
        sys.exit("\n".join(f"{place}: {error}" for place, error in sorted(wrong.items())))
    for protocol, where in told["where"].items():
        globals()[f"use_{protocol}"](where, told["flow"])
        asyncio.run(globals()[f"use_{protocol}_async"](where, told["flow"]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
