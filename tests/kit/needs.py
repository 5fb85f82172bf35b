"""The table of programs and features that tests need beyond those that build counterd, with their packages.

A test says `@pytest.mark.needs("openssl")` and gets the program from path(). Missing needs are listed before the tests.
Tests with missing needs are skipped, or fail if CI is set in the environment. `python3 tests/kit/needs.py` lists the
missing packages, --install installs them. It imports the standard library only, so that any Python can run it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Need(NamedTuple):
    """A need. why: its purpose. package: in Debian and Ubuntu; `remedy` helps without it. is_there: checks it."""

    why: str
    package: str = ""
    remedy: str = ""
    is_there: Callable[[], bool] | None = None  # a program of that name is on the path, if None


def has_ipv6() -> bool:
    """Returns True if ::1 can be bound."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def can_make_networks() -> bool:
    """Returns True if creating network namespaces is permitted."""
    command = ["unshare", "--net", "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    return False


def can_mount() -> bool:
    """Returns True if mounting a file system is permitted."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0
    return False


def find(program: str) -> str | None:
    """Finds a program on the path or in the sbin folders."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


TABLE: Mapping[str, Need] = {
    "yrmcdsd": Need("the reference server of the counter protocol", "yrmcds"),
    "beanstalkd": Need("the reference server of the beanstalk protocol", "beanstalkd"),
    "sqlite3": Need("copies a journal as people do", "sqlite3"),
    "ip": Need("hosts that vanish, in network namespaces", "iproute2"),
    "tc": Need("links that are slow", "iproute2"),
    "redis-server": Need("what counterbench speaks to", "redis-server"),
    "memcached": Need("what counterbench speaks to", "memcached"),
    "openssl": Need("a client of TLS that is not Python's", "openssl"),
    "nginx": Need("asks the gate, with the file in deploy/nginx", "nginx"),
    "caddy": Need("asks the gate, with the file in deploy/caddy", "caddy"),
    "mandoc": Need("reads the pages in man/", "mandoc"),
    "systemd-analyze": Need("reads the units in deploy/systemd", "systemd"),
    "kill": Need("the unit for systemd reloads with it", "procps"),
    "chromium": Need("the dashboard is tested in it", "chromium"),
    "promtool": Need("tests the alerts, reads the metrics", "prometheus"),
    "faketime": Need("a clock that steps, in the drills and in chaos", "faketime"),
    "spin": Need("visits every state of the formal model", "spin"),
    "gcc": Need("compiles what spin writes", "gcc"),
    "root": Need("becoming somebody else", remedy="run them as root", is_there=lambda: os.geteuid() == 0),
    "networks": Need(
        "hosts that vanish, in network namespaces",
        remedy="run them as root, where namespaces can be made: most containers forbid it",
        is_there=can_make_networks,
    ),
    "mounts": Need(
        "small disks",
        remedy="run them as root, where file systems can be mounted: most containers forbid it",
        is_there=can_mount,
    ),
    "ipv6": Need("::1", remedy="enable IPv6 on the loopback interface", is_there=has_ipv6),
}

MARKER = "needs(*names, partly=False): what it needs, of the table in tests/kit/needs.py; partly: it does less without"

_said: set[str] = set()  # the needs of the running test


@functools.cache
def is_missing(name: str) -> bool:
    need = TABLE[name]
    return not (need.is_there() if need.is_there else find(name))


def remedy(name: str) -> str:
    """Returns how to get what is missing."""
    need = TABLE[name]
    return f"apt-get install {need.package}" if need.package else need.remedy


def in_ci() -> bool:
    """Returns True if missing needs are failures."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def declare(name: str) -> None:
    """Says that this program needs it, as a mark does for a test. Ends the program if it is missing."""
    if is_missing(name):
        raise SystemExit(remedy(name))
    _said.add(name)


def path(program: str) -> str:
    """Returns the path of a program that is among the running test's needs."""
    assert program in _said, f'a test uses {program} without @pytest.mark.needs("{program}")'
    found = find(program)
    assert found is not None
    return found


# ---- for conftest.py -------------------------------------------------------------------------------------------------


def of(item: Any) -> dict[str, bool]:
    """Returns {need of a test: True if the test cannot run without it}."""
    marks = list(item.iter_markers("needs"))
    return {name: not mark.kwargs.get("partly") for mark in marks for name in mark.args}


def check(item: Any) -> str:
    """Returns why a test cannot run; "" if it can."""
    wanted = of(item)
    _said.clear()
    _said.update(wanted)
    for name, is_essential in wanted.items():
        if is_missing(name) and (is_essential or in_ci()):
            return f"no {name}: {remedy(name)}"
    return ""


def count(items: Iterable[Any]) -> dict[str, int]:
    """Returns {missing need: how many of the tests have it}, in the order of the table."""
    needed = [name for item in items for name in of(item)]
    return {name: needed.count(name) for name in TABLE if name in needed and is_missing(name)}


def report(counts: Mapping[str, int]) -> list[str]:
    """Returns lines about what is missing, for people; none if nothing is."""
    if not counts:
        return []
    fate = "fail, because CI is set" if in_ci() else "are skipped, or do less"
    lines = [f"missing on this machine; tests that need it {fate}:"]
    for name, tests in counts.items():
        lines.append(f"  {name:<16} {tests:>4} tests  {remedy(name)}  ({TABLE[name].why})")
    if any(TABLE[name].package for name in counts):
        lines.append("`make test-deps` installs all of the packages")
    return lines


# ---- the command -----------------------------------------------------------------------------------------------------


def packages() -> list[str]:
    """Returns the missing packages."""
    return sorted({need.package for name, need in TABLE.items() if need.package and is_missing(name)})


def install(wanted: list[str]) -> int:
    """Installs packages. Returns an exit status."""
    if find("apt-get") is None:
        print(f"test-deps: no apt-get here; install what has {' '.join(wanted)}", file=sys.stderr)
        return 1
    if os.geteuid() != 0:
        print(f"test-deps: only root can install them: sudo apt-get install {' '.join(wanted)}", file=sys.stderr)
        return 1
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    known = [each for each in wanted if _is_known(each)]
    if known:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *known]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    is_missing.cache_clear()
    for name in (name for name, need in TABLE.items() if need.package in wanted and is_missing(name)):
        print(f"test-deps: no {name} ({TABLE[name].why}): no package {TABLE[name].package} brings it", file=sys.stderr)
    return 1 if packages() else 0


def _is_known(package: str) -> bool:
    """Returns True if this system has the package. Not every system has all of them."""
    said = subprocess.run(["apt-cache", "policy", package], capture_output=True, text=True, check=False).stdout
    return "Candidate: " in said and "Candidate: (none)" not in said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the packages that are missing (as root)")
    options = parser.parse_args()
    wanted = packages()
    if not options.install:
        print("\n".join(wanted) or "nothing is missing")
        return 0
    if not wanted:
        print("test-deps: nothing is missing")
        return 0
    return install(wanted)


if __name__ == "__main__":
    sys.exit(main())
