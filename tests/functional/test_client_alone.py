"""The clients stand alone: without compiled modules or installed packages, with each Python on this machine.

Only the clients' files are copied to an empty folder. A program in an isolated Python (alone.py) imports each of
their modules, and uses each client against a daemon."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import counterd
from counterd import protocols
from kit.machine import PATIENCE
from scenarios.sentinel import OTHER
from scenarios.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(counterd.__file__).parent
PROGRAM = Path(__file__).with_name("alone.py")
OWN = ("__init__.py", "version.py", "errors.py")  # of counterd itself
HALVES = ("wire.py", "errors.py")  # of a protocol: what its clients need
OLDEST = int(re.fullmatch(r">=3\.(\d+)", metadata("counterd")["Requires-Python"])[1])  # type: ignore[index]


def pythons() -> dict[str, str]:
    """Returns {version: path} of this Python and of others, on the path and of pyenv, that counterd is for."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    of_pyenv = [path for folder in folders if folder.name == "shims" for path in folder.parent.glob("versions/*/bin")]
    found = {}
    for folder in (*of_pyenv, *(folder for folder in folders if folder.name != "shims")):
        for path in folder.glob("python3.*"):
            match = re.fullmatch(r"python3\.(\d+)", path.name)
            if match and int(match[1]) >= OLDEST:
                found[int(match[1])] = str(path)
    found[sys.version_info.minor] = sys.executable
    return {f"3.{minor}": path for minor, path in sorted(found.items())}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which only the clients are, with what they may need.

    The packages of the protocols are empty: what is in them is the daemon's.
    """
    folder = tmp_path_factory.mktemp("alone")
    files = [*(PACKAGE / name for name in OWN), *(PACKAGE / "client").rglob("*.py")]
    files += [path for name in HALVES for path in PACKAGE.glob(f"protocols/*/{name}")]
    for path in files:
        copy = folder / "counterd" / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for package in ("", *protocols.names()):
        (folder / "counterd" / "protocols" / package / "__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server") / "daemon") as running:
        yield running


def where(server: Server, protocol: str) -> list[object]:
    """Returns the arguments of a client: where its server is."""
    if protocol == "smockron":
        return [f"{host}:{port}" for host, port in map(server.where, ("smockron", "smockron-control"))]
    return list(server.where(protocol))


def modules(folder: Path) -> list[str]:
    found = (path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    return [".".join(parts).removesuffix(".__init__") for parts in found]


def run(python: str, folder: Path, told: dict[str, object]) -> tuple[int, str]:
    """Runs the program. Returns its exit status and output."""
    done = subprocess.run(
        [python, "-I", "-S", "-B", PROGRAM, f"{folder}{os.sep}", json.dumps({"modules": modules(folder), **told})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("version", pythons())
def test_the_clients_work_alone(server: Server, alone: Path, version: str) -> None:
    places = {protocol: where(server, protocol) for protocol in protocols.names()}
    assert run(pythons()[version], alone, {"where": places, "flow": OTHER}) == (0, "")


@pytest.mark.parametrize("needs", ["hiredis", "counterd._core", "counterd.contract"])
def test_a_wrong_import_is_named(tmp_path: Path, alone: Path, needs: str) -> None:
    """Once, however many others import that module."""
    copy = tmp_path / "copy"
    shutil.copytree(alone, copy)
    changed = copy / "counterd" / "client" / "_backoff.py"
    lines = changed.read_text().splitlines()
    changed.write_text("\n".join([*lines, f"import {needs}"]))
    found = f"counterd/client/_backoff.py:{len(lines) + 1}: ModuleNotFoundError(\"No module named '{needs}'\")\n"
    assert run(sys.executable, copy, {}) == (1, found)
