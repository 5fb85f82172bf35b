"""Starting: the command line, the configuration, the sockets, and the notification that it is ready."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import counterd
from counterd.client import Client
from counterd.control.config.loading import SYSTEM_FILE
from counterd.version import __version__
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONF = Path(__file__).parents[2] / "conf" / "counterd.conf"
PROGRAMS = {"module": daemon.MODULE, "script": (daemon.SCRIPT,)}

needs_root = pytest.mark.needs("root")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a configuration file."""

    def written(text: str) -> Path:
        path = tmp_path / "a.conf"
        path.write_text(text)
        return path

    return written


# ---- a start that works ----


def test_the_daemon_does_not_import_rich() -> None:
    """Importing it took a quarter of a start."""
    assert util.find_spec("rich") is not None
    code = "import sys, counterd.cli.daemon; print('rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.needs("ipv6")
def test_the_default_addresses_are_both_loopback_addresses(start: Callable[..., daemon.Daemon]) -> None:
    running = start({"counter.bind": ""})
    assert [address.host for address in running.addresses] == ["127.0.0.1", "::1"]
    assert running.addresses[0].port == running.addresses[1].port
    with Client(*running.addresses[0]) as client, Client(*running.addresses[1]) as other:
        client.acquire("shared", 2, maximum=3)
        assert other.get("shared") == 2
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", running.address.port)) == errno.ECONNREFUSED


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_script_and_the_module_start_the_daemon(program: str, start: Callable[..., daemon.Daemon]) -> None:
    running = start(program=PROGRAMS[program])
    assert running.stats()["pid"] == running.pid
    assert len(running.lines("listens on")) == 1
    (ready,) = running.lines(r"\bready\b")
    assert f"ready: counterd {__version__} pid={running.pid}" in ready


SIGNALS = """\
import os, signal, sys
class Sender:
    def find_spec(self, name, *_):
        if name == "uvloop":
            for number in (signal.SIGHUP, signal.SIGUSR1):
                os.kill(os.getpid(), number)
sys.meta_path.insert(0, Sender())
from counterd.__main__ import main
sys.exit(main())"""


def test_signals_during_the_start_do_not_end_the_daemon(start: Callable[..., daemon.Daemon]) -> None:
    """Its modules are still being imported."""
    running = start(program=(sys.executable, "-c", SIGNALS))
    assert running.stats()["pid"] == running.pid


def test_set_overrides_the_file(start: Callable[..., daemon.Daemon]) -> None:
    running = start(
        {"counter.max_connections": 2}, arguments=["--set", "counter.max_connections=3", "--set", "log.level=debug"]
    )
    assert running.stats()["connections_max"] == 3
    assert running.lines("DEBUG")


def test_the_file_in_conf_works_unchanged(start: Callable[..., daemon.Daemon]) -> None:
    running = start(text=CONF.read_text(), arguments=["--set", "counter.port=0"])
    with running.client() as client:
        assert client.acquire("jobs", maximum=1) == 1


@pytest.mark.skipif(SYSTEM_FILE.exists(), reason="this machine has a configuration of its own")
def test_without_a_file_the_shipped_one_is_used() -> None:
    result = daemon.run("--check")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"/.*/counterd/counterd\.conf: ok\n", result.stdout)


def test_a_file_of_yrmcds_works_unchanged(start: Callable[..., daemon.Daemon]) -> None:
    text = """\
# a configuration of yrmcds
user = ""
virtual_ip = 127.0.0.1
bind_ip = "127.0.0.2"
port = 11211
repl_port = 11213
max_connections = 100
temp_dir = "/var/tmp"
log.threshold = warning
log.file = "/nonexistent/yrmcds.log"
buckets = 1000000
max_data_size = 1M
memory_limit = 1G
workers = 8
counter.enable = true
counter.port = 0
counter.buckets = 5000
counter.stat_interval = 3600
"""
    running = start(text=text, arguments=["--set", "log.level=info"])
    assert [address.host for address in running.addresses] == ["127.0.0.1", "127.0.0.2"]
    with Client(*running.addresses[1]) as client:
        client.acquire("jobs", maximum=1)
        assert client.stats()["buckets"] == "5000"
    warning = running.wait_for_log("WARNING")  # behind the line that it is ready
    assert running.lines("WARNING") == [warning]
    assert "workers" in warning
    assert "memory_limit" in warning


# ---- who is told ----


@pytest.fixture(params=["file", "abstract"])
def notified(request: pytest.FixtureRequest, short_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket like systemd's, and the value of NOTIFY_SOCKET for it."""
    shown = str(short_path / "notify") if request.param == "file" else f"@{short_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(shown.replace("@", "\0", 1))
        listening.settimeout(daemon.PATIENCE)
        yield listening, shown


def test_systemd_is_notified(notified: tuple[socket.socket, str], start: Callable[..., daemon.Daemon]) -> None:
    listening, shown = notified
    running = start(env={"NOTIFY_SOCKET": shown})
    assert listening.recv(4096) == b"READY=1\nSTATUS=serving counter"
    running.stop()
    assert listening.recv(4096) == b"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=15000000"


def test_ready_means_that_a_connection_is_accepted(tmp_path: Path, short_path: Path) -> None:
    """Systemd starts what depends on it at that moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(short_path / "notify"))
        listening.settimeout(daemon.PATIENCE)
        settings = {"counter.socket": str(short_path / "counterd")}
        env = {"NOTIFY_SOCKET": str(short_path / "notify")}
        with daemon.running(tmp_path / "d", settings, env=env, stderr=subprocess.DEVNULL) as running:
            assert listening.recv(4096) == b"READY=1\nSTATUS=serving counter"
            with running.client() as client:
                client.noop()


def test_a_missing_notify_socket_is_no_error(short_path: Path, start: Callable[..., daemon.Daemon]) -> None:
    running = start(env={"NOTIFY_SOCKET": str(short_path / "nobody")})
    assert running.stats()["internal_errors"] == 0


# ---- who it becomes ----


@needs_root
def test_the_daemon_becomes_the_configured_user(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(short_path, nobody.pw_uid, nobody.pw_gid)
    path = short_path / "counterd"
    grouped = daemon.after("import os\nos.setgroups([0, 12345])")
    running = start({"user": "nobody", "counter.socket": path}, program=grouped)
    assert running.status("Uid").split() == [str(nobody.pw_uid)] * 4
    assert running.status("Gid").split() == [str(nobody.pw_gid)] * 4
    groups = {str(group) for group in os.getgrouplist("nobody", nobody.pw_gid)}
    assert set(running.status("Groups").split()) == groups
    assert int(running.status("CapEff"), 16) == 0
    assert (path.stat().st_uid, path.stat().st_gid) == (nobody.pw_uid, nobody.pw_gid)
    with Client(path=path) as client:
        assert client.acquire("jobs", maximum=1) == 1
    assert running.stop() == 0
    assert not path.exists()


@needs_root
def test_the_daemon_becomes_only_the_configured_group(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    nogroup = grp.getgrnam("nogroup").gr_gid
    path = short_path / "counterd"
    grouped = daemon.after("import os\nos.setgroups([0, 12345])")
    running = start({"group": nogroup, "counter.socket": path}, program=grouped)
    assert running.status("Uid").split() == ["0"] * 4
    assert running.status("Gid").split() == [str(nogroup)] * 4
    assert running.status("Groups").split() == [str(nogroup)]
    assert (path.stat().st_uid, path.stat().st_gid) == (0, nogroup)


@needs_root
def test_an_installation_unreadable_for_the_user_works(start: Callable[..., daemon.Daemon], tmp_path: Path) -> None:
    """All that it needs is loaded before."""
    private = tmp_path / "private"
    shutil.copytree(Path(counterd.__file__).parent, private / "counterd")
    private.chmod(0o700)
    running = start({"user": "nobody"}, env={"PYTHONPATH": str(private)})
    assert str(private) in Path(f"/proc/{running.pid}/maps").read_text()
    running.stats()


@needs_root
def test_a_socket_left_in_a_directory_of_root_is_taken_over(
    start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    short_path.chmod(0o755)
    path = short_path / "counterd"
    settings = {"user": "nobody", "counter.socket": path}
    assert start(settings).stop() == 0
    assert path.is_socket()
    running = start(settings)
    with Client(path=path) as client:
        assert client.stats()["pid"] == str(running.pid)


# ---- a start that fails ----


def test_the_error_without_a_thread_for_the_log(write: Callable[[str], Path]) -> None:
    path = write("counter.enable = true\ncounter.port = 0\n")
    result = daemon.run("-c", path, program=daemon.without_thread("log"))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("cannot start a thread: can't start new thread")


def test_without_memory_for_reads(write: Callable[[str], Path]) -> None:
    """As with a limit of the address space that the tables just fit into."""
    path = write("counter.enable = true\ncounter.port = 0\n")
    code = """\
import ctypes, resource
from counterd.control import service
def fill(*arguments):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for room in 256 << 10, 32 << 10:
        while ctypes.CDLL(None).malloc(room):
            pass
    return Server(*arguments)
Server, service.Server = service.Server, fill"""
    result = daemon.run("-c", path, program=daemon.within(code))
    assert result.returncode == 1
    assert "out of memory: is the address space of the process limited?" in result.stderr.splitlines()
    assert "Traceback" not in result.stderr


def test_admin_works_without_proc(write: Callable[[str], Path]) -> None:
    path = write("counter.enable = true\ncounter.port = 0\nadmin.enable = true\nadmin.bind = 127.0.0.1:0\n")
    code = "import counterd.control.inspector\ncounterd.control.inspector.MEMORY = '/nonexistent/statm'"
    result = daemon.run("-c", path, program=daemon.within(code))
    assert result.returncode == 2
    line = f"{path}:3: admin.enable: cannot read /nonexistent/statm: No such file or directory"
    assert line in result.stderr.splitlines()  # among those of the log, whose thread writes when it likes


def test_version_is_printed() -> None:
    for program in PROGRAMS.values():
        result = daemon.run("--version", program=program)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"counterd {__version__}\n", "")


def test_check_prints_ok(write: Callable[[str], Path]) -> None:
    path = write("counter.enable = true\n")
    result = daemon.run("-c", path, "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{path}: ok\n", "")


@pytest.mark.parametrize("check", [True, False], ids=["check", "start"])
def test_every_mistake_is_one_line_with_its_place(check: bool, write: Callable[[str], Path]) -> None:
    path = write(
        "counter.enable = yes\n\n# fine\ncounter.prot = 1\nlog.level = loud\ncounter.port = 65536\nnonsense\n"
        "counter.stats_interval = 9\n"
    )
    result = daemon.run("-c", path, "--set", "drain.timeout=soon", *(["--check"] if check else []))
    lines = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    places = [f"{path}:{number}" for number in (1, 4, 5, 6, 7, 8)] + ["--set drain.timeout=soon"]
    assert sorted(line.split(": ", 1)[0] for line in lines) == sorted(places)
    assert "did you mean counter.port?" in result.stderr


def test_the_error_if_no_protocol_is_enabled(write: Callable[[str], Path]) -> None:
    path = write("counter.port = 0\n")
    result = daemon.run("-c", path)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{path}: ")
    assert (
        "set beanstalk.enable or counter.enable or sentinel.enable or smockron.enable or throttr.enable = true" in line
    )


def test_the_error_for_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.conf"
    result = daemon.run("-c", path)
    assert result.returncode == 2
    assert result.stderr == f"{path}: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("check", [True, False], ids=["check", "start"])
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_a_device_as_configuration_is_refused(path: str, check: bool) -> None:
    result = daemon.run("-c", path, *(["--check"] if check else []))
    assert result.returncode == 2
    assert re.fullmatch(f"{path}: (is not a regular file|cannot be read: No such device or address)\n", result.stderr)


def test_an_unwritten_pipe_as_configuration_is_an_error(tmp_path: Path) -> None:
    """It is not waited for without end, and does not count as an empty file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    command = [*daemon.MODULE, "-c", path, "--check"]
    result = subprocess.run(command, capture_output=True, text=True, env=daemon.environment(), cwd="/", check=False)
    assert result.returncode == 2
    assert result.stderr == f"{path}: is a pipe that was not written to its end within 10 s\n"


@pytest.mark.parametrize("lines", [1, 20_000])
def test_a_pipe_as_configuration_is_read_to_its_end(lines: int) -> None:
    """As of `counterd -c <(generate)`."""
    end, other = os.pipe()
    with subprocess.Popen(
        [*daemon.MODULE, "--check", "-c", f"/dev/fd/{end}"], pass_fds=(end,), stdout=subprocess.PIPE, cwd="/"
    ) as checking:
        os.close(end)
        with os.fdopen(other, "w") as pipe:
            pipe.write("# a line\n" * lines + "counter.enable = true\n")
        assert checking.stdout is not None
        assert checking.stdout.read() == f"/dev/fd/{end}: ok\n".encode()
    assert checking.returncode == 0


def test_an_unknown_option_is_refused() -> None:
    result = daemon.run("--daemonize")
    assert result.returncode == 2
    assert "--daemonize" in result.stderr


def test_two_daemons_on_one_port_are_refused(write: Callable[[str], Path], start: Callable[..., daemon.Daemon]) -> None:
    """They would be two limits. The first one is not disturbed."""
    first = start()
    with first.client() as client:
        client.acquire("jobs", maximum=1)
        path = write(f"counter.enable = true\ncounter.bind = 127.0.0.1\ncounter.port = {first.address.port}\n")
        result = daemon.run("-c", path)
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert (
            line == f"{path}:3: counter.port: cannot listen on 127.0.0.1:{first.address.port}: address already in use"
        )
        assert client.get("jobs") == 1


def test_the_error_for_a_port_in_use(write: Callable[[str], Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = daemon.run("-c", write("counter.enable = true\n"), "--set", f"counter.port={port}")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line == f"--set: counter.port: cannot listen on 127.0.0.1:{port}: address already in use"


def test_the_daemon_can_restart_at_once_on_the_same_port(start: Callable[..., daemon.Daemon]) -> None:
    """Although connections that the first one closed are still in TIME_WAIT."""
    first = start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(first.client()) for _ in range(5)]
        clients[0].noop()
        assert first.stop() == 0
        second = start({"counter.port": first.address.port})
        assert second.address == first.address
        assert second.stats()["curr_connections"] == 1


def test_the_error_for_an_unknown_user(write: Callable[[str], Path]) -> None:
    path = write("counter.enable = true\ncounter.port = 0\nuser = no-such-user\n")
    result = daemon.run("-c", path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{path}:3: user: ")


@needs_root
def test_the_error_without_the_right_to_change_the_user(write: Callable[[str], Path]) -> None:
    """Root without CAP_SETGID and CAP_SETUID, as in many containers. PR_CAPBSET_DROP is 24."""
    path = write("counter.enable = true\ncounter.port = 0\ncounter.bind = 127.0.0.1\nuser = nobody\n")
    dropped = daemon.after("import ctypes\nfor number in 6, 7: ctypes.CDLL(None).prctl(24, number)")
    result = daemon.run("-c", path, program=dropped)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{path}:4: user: cannot change the user of the process to nobody: ")


def test_memory_that_cannot_be_had(write: Callable[[str], Path]) -> None:
    """Far more than the address space: an error of one line, not a traceback."""
    path = write(
        "counter.enable = true\ncounter.port = 0\ncounter.bind = 127.0.0.1\n"
        "counter.buckets = 500000000\ncounter.name_memory = 128G\n"
    )
    limited = daemon.after("import resource\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))")
    result = daemon.run("-c", path, program=limited)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{path}: counter: cannot map ")
