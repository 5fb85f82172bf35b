"""Starts what counterd is compared with, each on one core, with what it needs to be at its best.

counterd    the installed one, with its defaults
raw loop    an epoll loop in C around counterd's own session: what the system calls of a server cost at least
yrmcdsd     the server that counterd replaces, two workers
redis       redis-server, without persistence; "redis Lua" the same, asked by scripts for what a sentinel protocol does
memcached   one thread, incr and decr
beanstalkd  as it is; "-b" with its log, which reaches the disk every 50 ms, "-b -f0" with each change
pyzmq loop  a SUB socket of libzmq in Python that receives messages, and does nothing with them: receiving.py
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterd.bench.dialects import sentinel, smockron
from native import load_native
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

PACKAGES = {  # in Debian, by the first word of the names of the servers that need them
    "yrmcdsd": "yrmcds", "redis": "redis-server", "memcached": "memcached", "beanstalkd": "beanstalkd",
}  # fmt: skip
PROGRAMS = {"redis": "redis-server"}  # where that word is not the program
CONNECTIONS_MAX = 20_000
START_S = 20.0
POLL_S = 0.001  # largest error of the time of a start
BUCKETS = 1_000_000
FLOWS = 1000  # semaphores of a sentinel protocol, and as many rates
LIMIT = 1_000_000
OFFLINE_MS = 1000  # time until a disconnected client loses its tokens
THROTTLED = "throttled"  # a domain of a smockron master in which all identifiers wait for a day
LEASE = {"resourceTimeout": 600_000, "clientOfflineTime": OFFLINE_MS}

RECEIVING = Path(__file__).with_name("receiving.py")

YRMCDSD = """\
virtual_ip = {host}
bind_ip = 127.0.0.2
port = {ports[0]}
repl_port = {ports[1]}
temp_dir = "{directory}"
workers = 2
counter.enable = true
counter.port = {ports[2]}
counter.buckets = {buckets}
"""


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    protocol: str
    pid: int
    port: int
    work: str = ""  # replaces the plan's work if the server has another name for it
    control_port: int = 0  # only smockron masters have one

    def cpu_ns(self) -> int:
        """Returns the CPU time of all threads of the server and its children, which include a journal's writer."""
        tasks = [task for pid in (self.pid, *self._children()) for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    def _children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def resident(self) -> int:
        """Returns the bytes of physical memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def missing(scenarios: list[dict[str, Any]]) -> list[str]:
    """Returns the Debian packages that the servers of these scenarios need and that are not installed."""
    used = {name.split()[0] for each in scenarios for name in each.get("servers", STARTS)}
    if any("{redis}" in setting for each in scenarios for setting in each.get("settings", ())):
        used.add("redis")
    return [package for word, package in PACKAGES.items() if word in used and not _find(PROGRAMS.get(word, word))]


def versions() -> dict[str, str]:
    """Returns the versions of the peers' Debian packages."""
    command = ["dpkg-query", "--show", "--showformat", "${Version}"]
    found = dict.fromkeys(PACKAGES.values(), "unknown")
    for package in found if shutil.which(command[0]) else ():
        said = subprocess.run([*command, package], capture_output=True, text=True, check=False).stdout
        found[package] = said or "unknown"
    return found


def two_cores() -> tuple[int, int]:
    """Returns the cores for the servers and for the load, which are the same if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


def allow_connections() -> None:
    """Raises the limit of open files for CONNECTIONS_MAX. The servers inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, CONNECTIONS_MAX + 1000), hard))


@contextlib.contextmanager
def counterd(core: int | None = None, *settings: str, protocol: str = "counter") -> Iterator[Server]:
    """Runs the daemon with one protocol on a free port of loopback. settings: KEY=VALUE; others have their defaults."""
    alone = [] if protocol == "counter" else ["counter.enable=false", f"{protocol}.enable=true"]  # shared descriptors
    chosen = [*alone, f"{protocol}.port=0", f"{protocol}.bind=127.0.0.1", *settings]
    if protocol == "smockron":
        chosen.append("smockron.control_port=0")
    command = [sys.executable, "-m", "counterd", *(word for each in chosen for word in ("--set", each))]
    with _process(command, core, stderr=subprocess.PIPE, text=True) as process:
        ports = {}
        for line in process.stderr:
            if found := re.search(rf"({protocol}\S*) listens on 127\.0\.0\.1:(\d+)", line):  # a line of text or of JSON
                ports[found[1]] = int(found[2])
            if "ready" in line:
                break
        else:
            raise RuntimeError(f"counterd did not come up (exit status {process.wait()})")
        yield Server(
            "counterd", protocol, process.pid, ports[protocol], control_port=ports.get(f"{protocol}-control", 0)
        )


@contextlib.contextmanager
def raw_loop(core: int | None = None) -> Iterator[Server]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    native = load_native()
    pid = os.fork()
    if pid == 0:
        try:
            _serve_raw(native, listening, core)
        finally:
            os._exit(1)  # otherwise an exception would clean up what belongs to the parent, such as other servers
    try:
        yield Server("raw loop", "counter", pid, listening.getsockname()[1])
    finally:
        listening.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve_raw(native: ModuleType, listening: socket.socket, core: int | None) -> None:
    from counterd.protocols.counter._session import open_store

    os.setsid()
    if core is not None:
        os.sched_setaffinity(0, {core})
    store = open_store(
        buckets=BUCKETS, holdings=2 * BUCKETS, name_memory=1 << 28, hash_key=os.urandom(16), figures=dict
    )
    store.begin_window(1)
    native.serve_raw(listening.fileno(), store)


@contextlib.contextmanager
def redis(core: int | None = None, name: str = "redis", protocol: str = "redis", work: str = "") -> Iterator[Server]:
    (port,) = free_ports(1)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    options += ["--maxclients", str(CONNECTIONS_MAX), "--loglevel", "warning"]
    with _process([_find("redis-server"), *options], core, stdout=subprocess.DEVNULL) as process:
        yield _up(Server(name, protocol, process.pid, port, work), process)


@contextlib.contextmanager
def memcached(core: int | None = None) -> Iterator[Server]:
    (port,) = free_ports(1)
    options = ["-l", "127.0.0.1", "-p", str(port), "-U", "0", "-t", "1", "-c", str(CONNECTIONS_MAX), "-m", "1024"]
    with _process([_find("memcached"), *options, "-u", "nobody"], core) as process:
        yield _up(Server("memcached", "memcached", process.pid, port), process)


@contextlib.contextmanager
def yrmcdsd(core: int | None = None) -> Iterator[Server]:
    ports = free_ports(3)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "yrmcds.conf"
        config.write_text(YRMCDSD.format(host="127.0.0.1", ports=ports, directory=directory, buckets=BUCKETS))
        output = subprocess.DEVNULL
        with _process([_find("yrmcdsd"), "-f", str(config)], core, stdout=output, stderr=output) as process:
            yield _up(Server("yrmcdsd", "counter", process.pid, ports[2]), process)


@contextlib.contextmanager
def beanstalkd(core: int | None = None, log: tuple[str, ...] = ()) -> Iterator[Server]:
    """Runs beanstalkd. log: options for its log, which then gets its own directory."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as directory:
        options = ["-l", "127.0.0.1", "-p", str(port), *(["-b", directory, *log[1:]] if log else [])]
        name = " ".join(["beanstalkd", *log])
        with _process([_find("beanstalkd"), *options], core, stderr=subprocess.DEVNULL) as process:
            yield _up(Server(name, "beanstalk", process.pid, port), process)


@contextlib.contextmanager
def pyzmq_loop(core: int | None = None) -> Iterator[Server]:
    (port,) = free_ports(1)
    with _process([sys.executable, str(RECEIVING), str(port)], core) as process:
        yield _up(Server("pyzmq loop", "smockron", process.pid, port), process)


STARTS: dict[str, Callable[[int | None], contextlib.AbstractContextManager[Server]]] = {
    "counterd": counterd,
    "raw loop": raw_loop,
    "redis": redis,
    "memcached": memcached,
    "yrmcdsd": yrmcdsd,
}
# Peers of the sentinel protocol, and of Takes.
SCRIPTED = {
    "redis Lua": functools.partial(redis, name="redis Lua", protocol="redis-lua"),
    "redis Lua, estimated": functools.partial(redis, name="redis Lua, estimated", protocol="redis-lua", work="counts"),
}
# Peers of the beanstalk protocol.
QUEUES = {
    "beanstalkd": beanstalkd,
    "beanstalkd -b": functools.partial(beanstalkd, log=("-b",)),
    "beanstalkd -b -f0": functools.partial(beanstalkd, log=("-b", "-f0")),
}
# Peers of the smockron protocol: they do only a part of a master's work.
MASTERS = {"pyzmq loop": pyzmq_loop}


def starts_of(scenario: dict[str, Any]) -> dict[str, Callable[[int | None], contextlib.AbstractContextManager[Server]]]:
    """Returns the servers that a scenario can use, by name. A scenario's protocol and settings apply to counterd."""
    if "protocol" not in scenario:
        return STARTS
    ours = functools.partial(_with_settings, settings=scenario.get("settings", []), protocol=scenario["protocol"])
    return {**STARTS, **SCRIPTED, **QUEUES, **MASTERS, "counterd": ours}


@contextlib.contextmanager
def _with_settings(core: int | None, settings: list[str], protocol: str) -> Iterator[Server]:
    """Runs counterd. Replaces {directory} in settings by an empty one, {redis} by the URL of one on the load's core."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        given = {"directory": directory}
        if any("{redis}" in each for each in settings):
            given["redis"] = f"redis://127.0.0.1:{stack.enter_context(redis(two_cores()[1])).port}"
        settings = [each.format(**given) for each in settings]
        if protocol == "sentinel":
            rules = Path(directory) / "rules.json"
            rules.write_text(sentinel.rules_of(FLOWS, LIMIT, **LEASE))
            settings = [*settings, f"sentinel.rules={rules}", f"sentinel.max_allowed_qps={10**9}"]
        if protocol == "smockron":
            rules = Path(directory) / "rules.json"
            rules.write_text(
                json.dumps({**json.loads(smockron.rules_of(1, LIMIT)), THROTTLED: {"interval": "1 day", "burst": 0}})
            )
            settings = [*settings, f"smockron.rules={rules}"]
        yield stack.enter_context(counterd(core, *settings, protocol=protocol))


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def _process(command: list[str], core: int | None, **streams) -> Iterator[subprocess.Popen]:
    pin = [] if core is None else ["taskset", "--cpu-list", str(core)]  # taskset execs: the pid stays
    # A new session keeps Ctrl-C away from the servers: the comparison ends them itself.
    process = subprocess.Popen(pin + command, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _up(server: Server, process: subprocess.Popen) -> Server:
    """Returns the server once it accepts connections. Raises RuntimeError if it does not within START_S seconds."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return server
        time.sleep(POLL_S)
    raise RuntimeError(f"{server.name} did not come up (exit status {process.poll()})")
