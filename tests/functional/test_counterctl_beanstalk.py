"""`counterctl beanstalk` as a process, against the real daemon and its admin process."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.wire import Parser, Reply, Status
from kit import daemon, reference
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.certificates import Files

BEANSTALK = (Path(sys.executable).parent / "counterctl", "--timeout", f"{PATIENCE:g}s", "beanstalk")
TOKEN = "a-token"
SETTINGS = {
    "beanstalk.enable": "true",
    "beanstalk.port": "0",
    "beanstalk.bind": "127.0.0.1",
    "admin.enable": "true",
    "admin.bind": "127.0.0.1:0",
    "admin.token": TOKEN,
}
DONE = (0, "", "")


class Worker:
    """A client's connection."""

    def __init__(self, place: Place) -> None:
        self.socket = socket.create_connection(place.address, PATIENCE)
        self._parser = Parser()

    def ask(self, command: bytes) -> Reply:
        self.socket.sendall(command)
        return self.reply()

    def reply(self) -> Reply:
        while not (replies := self._parser.feed(self.socket.recv(65536))):
            pass
        (reply,) = replies
        return reply


class Place:
    """A daemon, and the address of it for counterctl."""

    def __init__(self, running: daemon.Daemon) -> None:
        self.daemon = running
        self.address = running.address_of("beanstalk")
        admin = running.address_of("admin")
        self.environment = daemon.environment(
            {
                "BEANSTALK_URL": f"beanstalk://{self.address.host}:{self.address.port}",
                "COUNTERD_ADMIN": f"http://{admin.host}:{admin.port}",
                "COUNTERD_ADMIN_TOKEN": TOKEN,
            }
        )

    def run(self, *arguments: str | bytes, stdin: bytes | None = None, **environment: str) -> Any:
        """Runs counterctl. Returns the ended process, with its output as bytes."""
        return subprocess.run(
            [*BEANSTALK, *arguments],
            input=b"" if stdin is None else stdin,
            capture_output=True,
            timeout=PATIENCE,
            env={**self.environment, **environment},
            check=False,
        )

    def ask(self, *arguments: str | bytes, stdin: bytes | None = None, **environment: str) -> tuple[int, str, str]:
        """Runs counterctl. Returns (status, stdout, stderr)."""
        done = self.run(*arguments, stdin=stdin, **environment)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def rows(self, *arguments: str | bytes, stdin: bytes | None = None) -> Any:
        status, stdout, stderr = self.ask(*arguments, "--output", "json", stdin=stdin)
        assert (status, stderr) == (0, "")
        return json.loads(stdout)

    def put(self, *arguments: str | bytes, stdin: bytes | None = None) -> str:
        """Puts a job. Returns its id."""
        row = self.rows("put", *arguments, stdin=stdin)
        assert row["status"] == "inserted"
        return str(row["id"])

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        worker = Worker(self)
        with worker.socket:
            yield worker


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with daemon.running(tmp_path_factory.mktemp("daemon"), SETTINGS) as running:
        yield Place(running)
        assert not running.lines("ERROR|Traceback|internal")


# ---- what there is ----


def test_a_job_from_put_to_delete(place: Place) -> None:
    status, stdout, stderr = place.ask("put", "hello", "--tube", "life", "--pri", "7", "--delay", "60m", "--ttr", "2m")
    assert (status, stdout.startswith("put job "), stderr) == (0, True, "")
    job = stdout.split()[2]
    figures = place.rows("stats", "--job", job)
    found = {name: figures[name] for name in ("id", "tube", "state", "pri", "delay", "ttr", "kicks")}
    assert found == {"id": job, "tube": "life", "state": "delayed", "pri": 7, "delay": 3600, "ttr": 120, "kicks": 0}
    assert place.ask("peek", "--tube", "life", "--state", "delayed") == (0, f"{job}  hello\n", "")
    assert place.ask("peek", "--tube", "life") == (1, "", "counterctl: no ready job in life\n")
    assert place.ask("kick", "--job", job) == DONE
    assert place.ask("kick", "--job", job) == (
        1,
        "",
        f"counterctl: job {job} does not exist, or is neither buried nor delayed\n",
    )
    assert place.rows("peek", "--tube", "life") == {"id": job, "body": "hello"}
    (row,) = place.rows("tubes", "--match", "li*")
    assert (row["tube"], row["ready"], row["delayed"], row["total"]) == ("life", 1, 0, 1)
    assert place.rows("stats", "--tube", "life")["current-jobs-ready"] == 1
    assert place.rows("stats")["current-jobs-ready"] >= 1
    assert place.ask("clear", "life", "buried") == (0, "cleared 0 jobs of life\n", "")
    assert place.ask("clear", "life", "ready") == (0, "cleared 1 job of life\n", "")
    for arguments in (("stats", "--job", job), ("peek", "--job", job)):
        assert place.ask(*arguments) == (1, "", f"counterctl: no job {job}\n")
    assert place.rows("tubes", "--match", "life") == []
    for arguments in (("stats", "--tube", "life"), ("clear", "life", "all"), ("list", "life")):
        assert place.ask(*arguments) == (1, "", "counterctl: no tube life\n")


def test_bodies_may_be_any_bytes(place: Place, tmp_path: Path) -> None:
    body = bytes(range(256)) + b"\r\n" * 3
    file = tmp_path / "body"
    file.write_bytes(body)
    jobs = [
        place.put("--tube", "bytes", "--file", str(file)),
        place.put("--tube", "bytes", "--file", "-", stdin=body),
        place.put("--tube", "bytes", stdin=body),
    ]
    for job in jobs:
        done = place.run("peek", "--job", job, "--raw")
        assert (done.returncode, done.stdout, done.stderr) == (0, body, b"")
    text = place.ask("peek", "--tube", "bytes")[1]
    assert text.startswith(rf"{jobs[0]}  \x00\x01")
    assert text.count("\n") == 1
    empty = place.put("", "--tube", "bytes")
    assert place.rows("peek", "--job", empty) == {"id": empty, "body": ""}
    argument = place.put(b"\xff\x01", "--tube", "bytes")
    assert place.rows("peek", "--job", argument)["body_base64"] == "/wE="
    assert place.ask("clear", "bytes", "all")[1] == "cleared 5 jobs of bytes\n"


def test_a_body_that_is_too_big_is_refused(place: Place) -> None:
    refused = (1, "", "counterctl: the body is longer than the server allows\n")
    assert place.ask("put", stdin=b"x" * 65536) == refused


def test_an_invalid_tube_name_is_refused(place: Place) -> None:
    status, stdout, stderr = place.ask("put", "x", "--tube", "a b")
    assert (status, stdout) == (2, "")
    assert stderr.startswith("counterctl: a tube's name has 1 to 200 of A-Z")


def test_a_job_with_a_key_is_put_once(place: Place) -> None:
    job = place.put("x", "--tube", "once", "--key", "order-7", "--unique-for", "60m")
    again = place.ask("put", "x", "--tube", "once", "--key", "order-7")
    assert again == (0, f"nothing was put: job {job} has this key\n", "")
    assert place.ask("clear", "once", "all")[0] == 0
    row = place.rows("put", "x", "--tube", "once", "--key", "order-7")
    assert row == {"id": job, "status": "exists"}, "its job has gone, and the hour has not"
    job = place.put("x", "--tube", "once", "--key", "order-8")
    assert place.rows("list", "once")[0]["key"] == "order-8"
    assert place.ask("clear", "once", "all")[0] == 0
    assert place.put("x", "--tube", "once", "--key", "order-8") != job


def test_a_job_waits_for_its_counter(place: Place) -> None:
    jobs = [place.put("x", "--tube", "limited", "--counter", "shop:a", "--maximum", "1") for _ in range(2)]
    with place.worker() as worker:
        assert worker.ask(wire.watch(b"limited")).status is Status.WATCHING
        assert worker.ask(wire.reserve(0)).status is Status.RESERVED
        assert worker.ask(wire.reserve(0)).status is Status.TIMED_OUT
        rows = place.rows("list", "limited")
        assert [(row["counter"], row["maximum"], row["blocked"]) for row in rows] == [
            ("shop:a", 1, "false"), ("shop:a", 1, "true")
        ]  # fmt: skip
        assert place.rows("tubes", "--match", "limited")[0]["blocked"] == 1
        for job in jobs:
            assert worker.ask(wire.delete(int(job))).status is Status.DELETED


def test_a_list_of_several_pages(place: Place) -> None:
    with place.worker() as worker:
        worker.ask(wire.use(b"many"))
        for number in range(2_005):
            assert worker.ask(wire.put(b"job %d." % number)).status is Status.INSERTED
        worker.ask(wire.watch(b"many"))
        reserved = worker.ask(wire.reserve())
        rows = place.rows("list", "many")
        assert len({row["id"] for row in rows}) == len(rows) == 2_005
        assert [row["state"] for row in rows[:2]] == ["reserved", "ready"]
        assert [int(row["id"]) for row in rows] == sorted(int(row["id"]) for row in rows)
        assert [row["id"] for row in place.rows("list", "many", "--state", "reserved")] == [str(reserved.number)]
        assert [row["id"] for row in place.rows("list", "many", "--search", "job 1999.")] == [rows[1999]["id"]]
        assert len(place.rows("list", "many", "--search", "job 19", "--limit", "7")) == 7
        status, stdout, stderr = place.ask("list", "many", "--limit", "1")
        assert (status, stderr) == (0, "")
        titles, line = (text.split() for text in stdout.splitlines())
        assert titles[:3] == ["id", "state", "pri"]
        assert line[:3] == [str(reserved.number), "reserved", "65,536"]
        worker.ask(wire.bury(reserved.number or 0))
    assert place.ask("kick", "10", "--tube", "many") == (0, "kicked 1 job of many\n", "")
    assert place.rows("kick", "10", "--tube", "many") == {"kicked": 0}
    assert place.rows("clear", "many", "all") == {"cleared": 2_005}


def test_tubes_are_sorted(place: Place) -> None:
    for tube, options in (("s-one", ()), ("s-two", ("--delay", "60m")), ("s-two", ("--delay", "60m")), ("s-three", ())):
        place.put("x", "--tube", tube, *options)
    with place.worker() as worker:
        for number in range(250):  # more than are asked for at once
            worker.ask(wire.watch(b"s-w%d" % number))
        names = [row["tube"] for row in place.rows("tubes", "--match", "s-*")]
        assert (len(names), names) == (253, sorted(names))
    assert [row["tube"] for row in place.rows("tubes", "--sort", "delayed", "--limit", "1")] == ["s-two"]
    csv = place.ask("tubes", "--match", "s-one", "--output", "csv")[1].splitlines()
    assert csv[0] == "tube,ready,reserved,delayed,buried,waiting,total,oldest,paused,blocked"
    assert csv[1].startswith("s-one,1,0,0,0,0,1,")
    for tube in ("s-one", "s-two", "s-three"):
        assert place.ask("clear", tube, "all")[0] == 0


def test_reserved_shows_the_jobs_of_a_worker(place: Place) -> None:
    job = place.put("x", "--tube", "held")
    with place.worker() as worker:
        worker.ask(wire.watch(b"held"))
        assert str(worker.ask(wire.reserve()).number) == job

        def other(*arguments: str) -> Any:
            command = [BEANSTALK[0], *arguments, "--output", "json"]
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=place.environment, check=True)
            return json.loads(done.stdout)

        # Connections of commands that have just ended may be there still; they hold nothing.
        (connection,) = (row for row in other("connections", "--protocol", "beanstalk") if row["holdings"])
        (row,) = other("holdings", connection["id"])
        assert (row["job"], row["tube"], row["left"] > 0) == (job, "held", True)
        worker.ask(wire.delete(int(job)))


# ---- tail ----


@contextlib.contextmanager
def following(place: Place, tube: str) -> Iterator[subprocess.Popen[str]]:
    """Runs counterctl, which shows jobs, during the block; then Ctrl-C must end it well, without further jobs."""
    process = subprocess.Popen(
        [*BEANSTALK, "tail", tube, "--interval", "50ms", "--output", "json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment,
    )
    with process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE) == ("", "")
            assert process.returncode == 0
        finally:
            process.kill()


def row_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def lists(place: Place) -> int:
    return int(place.rows("stats")["cmd-list-jobs"])


def wait_until_it_follows(place: Place) -> None:
    """Waits until it follows. To find the newest job it lists at most 64 times, as an id has 64 bits; later lists are
    its polls.
    """
    begun = lists(place)
    wait_until(lambda: lists(place) > begun + 65, "it looks")


def test_follow_shows_new_jobs_once(place: Place) -> None:
    old = place.put("old", "--tube", "news")
    with following(place, "news") as process:
        wait_until_it_follows(place)
        with place.worker() as worker:
            worker.ask(wire.watch(b"news"))
            worker.ask(wire.use(b"news"))
            taken = worker.ask(wire.reserve())
            assert str(taken.number) == old
            worker.ask(wire.delete(taken.number or 0))
            jobs = [worker.ask(wire.put(body)).number for body in (b"1", b"2", b"\xff")]
            place.put("elsewhere", "--tube", "other")
            rows = [row_of(process) for _ in jobs]
            assert [row["id"] for row in rows] == [str(number) for number in jobs]
            assert [row["body"] for row in rows] == ["1", "2", r"\xff"]
            assert {row["state"] for row in rows} == {"ready"}
            jobs.append(worker.ask(wire.put(b"late", delay=100)).number)
            row = row_of(process)
            assert (row["id"], row["state"], row["body"]) == (str(jobs[3]), "delayed", "late")
            assert worker.ask(wire.reserve_job(jobs[0] or 0)).status is Status.RESERVED
            seen = lists(place)
            wait_until(lambda: lists(place) > seen + 3, "it has looked again")
    assert place.ask("clear", "news", "all")[0] == 0


def test_follow_waits_for_a_tube(place: Place) -> None:
    with following(place, "later") as process:
        wait_until_it_follows(place)
        job = place.put("x", "--tube", "later")
        assert row_of(process)["id"] == job
    assert place.ask("clear", "later", "all")[0] == 0


# ---- drain ----


def test_drain_mode_is_switched(tmp_path: Path) -> None:
    with daemon.running(tmp_path, SETTINGS) as running:
        drain_and_go_on(Place(running))


def drain_and_go_on(place: Place) -> None:
    shown = "drain mode is {}: 1 ready, 0 reserved, 0 delayed, 0 buried\n"
    place.put("x", "--tube", "drained")
    wait_until(lambda: place.ask("drain", "--show") == (0, shown.format("off"), ""), "figures are new")
    with place.worker() as worker, place.worker() as waiting:
        waiting.ask(wire.watch(b"soon"))
        waiting.socket.sendall(wire.reserve())
        wait_until(lambda: place.rows("stats")["current-waiting"] == 1, "it waits")
        assert place.ask("drain") == (0, shown.format("on"), "")
        assert worker.ask(wire.put(b"more")).status is Status.DRAINING
        assert place.ask("put", "more") == (1, "", "counterctl: the server is draining and accepts no new jobs\n")
        assert place.rows("stats")["draining"] == "true"
        worker.ask(wire.watch(b"drained"))
        taken = worker.ask(wire.reserve())
        assert taken.status is Status.RESERVED
        assert worker.ask(wire.release(taken.number or 0, delay=0)).status is Status.RELEASED
        row = {"drain_mode": "on", "ready": 1, "reserved": 0, "delayed": 0, "buried": 0}
        wait_until(lambda: place.rows("drain", "--show") == row, "figures are new")
        assert place.rows("drain", "--off")["drain_mode"] == "off"
        assert place.rows("stats")["draining"] == "false"
        assert worker.ask(wire.use(b"soon")).status is Status.USING
        assert worker.ask(wire.put(b"x")).status is Status.INSERTED
        assert waiting.reply().status is Status.RESERVED, "it has waited all the time"
    assert len(place.daemon.lines("drain mode of beanstalk is on: new work is refused")) == 1
    assert len(place.daemon.lines("drain mode of beanstalk is off")) == 1


def test_drain_refuses_off_together_with_show(place: Place) -> None:
    status, stdout, stderr = place.ask("drain", "--off", "--show")
    assert (status, stdout) == (2, "")
    assert stderr.endswith("use either --off or --show\n")


def test_drain_mode_needs_the_token(place: Place) -> None:
    status, stdout, stderr = place.ask("drain", COUNTERD_ADMIN_TOKEN="another")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("counterctl: wrong token; ")
    assert place.ask("drain", "--show", COUNTERD_ADMIN_TOKEN="")[0] == 0
    assert place.rows("stats")["draining"] == "false"


def test_drain_mode_ends_with_the_process(tmp_path: Path) -> None:
    settings = {**SETTINGS, "beanstalk.journal": str(tmp_path / "journal")}
    with daemon.running(tmp_path / "first", settings) as running:
        place = Place(running)
        place.put("x")
        assert place.ask("drain")[0] == 0
    with daemon.running(tmp_path / "second", settings) as running:
        place = Place(running)
        assert place.rows("stats")["draining"] == "false"
        assert [row["ready"] for row in place.rows("tubes")] == [1]
        place.put("y")


def test_a_server_without_the_protocol(tmp_path: Path) -> None:
    settings = {"admin.enable": "true", "admin.bind": "127.0.0.1:0", "admin.token": TOKEN}
    with daemon.running(tmp_path, settings) as running:
        admin = running.address_of("admin")
        where = {"COUNTERD_ADMIN": f"http://{admin.host}:{admin.port}", "COUNTERD_ADMIN_TOKEN": TOKEN}
        for arguments, why in (
            (["drain"], "no protocol 'beanstalk' with a drain mode is enabled"),
            (["drain", "--show"], "the server does not serve the beanstalk protocol"),
        ):
            done = subprocess.run(
                [*BEANSTALK, *arguments],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                env=daemon.environment(where),
                check=False,
            )
            assert (done.returncode, done.stdout, done.stderr) == (1, "", f"counterctl: {why}\n")


# ---- other ways to a server, and another server ----


def test_over_tls_and_over_a_unix_socket(tmp_path: Path, short_path: Path, pem: Files) -> None:
    settings = {
        **SETTINGS,
        "beanstalk.tls.cert": pem.server,
        "beanstalk.tls.key": pem.server,
        "beanstalk.socket": short_path / "s",
    }
    with daemon.running(tmp_path, settings) as running:
        place = Place(running)
        url = f"beanstalks://{place.address.host}:{place.address.port}?cacert={pem.cacert}"
        assert place.ask("put", "x", BEANSTALK_URL=url) == (0, "put job 1\n", "")
        url = f"beanstalk+unix://{short_path / 's'}"
        assert place.ask("peek", BEANSTALK_URL=url) == (0, "1  x\n", "")


@pytest.mark.needs("beanstalkd")
def test_the_reference_server() -> None:
    """It knows the commands of its protocol, and says that it does not know the others."""
    with reference.beanstalkd() as address:

        def ask(*arguments: str) -> tuple[int, str, str]:
            done = subprocess.run(
                [*BEANSTALK, "-h", address.host, "-p", str(address.port), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                env=daemon.environment(),
                check=False,
            )
            return done.returncode, done.stdout, done.stderr

        assert ask("put", "hello", "--tube", "t") == (0, "put job 1\n", "")
        assert ask("tubes", "--match", "t")[1].splitlines()[1].split()[:3] == ["t", "1", "0"]
        assert ask("peek", "--tube", "t") == (0, "1  hello\n", "")
        unknown = (1, "", "counterctl: the server does not know this command, which only counterd has\n")
        for arguments in (["list", "t"], ["clear", "t", "all"], ["put", "x", "--key", "k"], ["tail", "t"]):
            assert ask(*arguments) == unknown
