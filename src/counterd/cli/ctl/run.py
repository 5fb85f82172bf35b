"""`counterctl run`: permits are held while a command runs. What flock(1) is for one machine.

Floor 5. The command inherits the connection, so the permits last as long as either of the two lives: nothing here may
ever shut the socket down, which would end it for both, only close it. Signals are blocked before the command exists,
and taken one by one, so none is lost and none comes twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from counterd.cli.ctl.common import DURATION, EXIT_SIGNAL, NAME, Target, explain, pass_target, say, shown
from counterd.errors import ConnectionLost, CounterdError, NotAvailable

if TYPE_CHECKING:
    from counterd.client import Client, Hold

# As env(1), timeout(1) and flock(1) have them: whatever is below is the command's own.
EXIT_TOO_LATE = 124
EXIT_FAILED = 125
EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127

SAID_AFTER_S = 1.0  # of waiting
GRACE_S = 10.0  # from SIGTERM to SIGKILL, when the permits were lost
DESCRIPTOR_MIN = 10  # of the connection in the command: scripts of shells use those below for themselves
NUMBER_MAX = (1 << 32) - 1

PASSED_ON = {
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
}  # fmt: skip
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}  # which the command must not inherit


class Mistake(click.UsageError):
    """Ends with a status that is not taken for the command's, as 2 would be."""

    exit_code = EXIT_FAILED


class Words(click.Command):
    """Options end at the first word after NAME that is none, so that those of COMMAND are its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, self._with_name_last(ctx, args))
        except click.UsageError as error:
            raise Mistake(error.format_message(), error.ctx) from None

    def _with_name_last(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The same words with all options before NAME, and the end of the options marked."""
        before = self._options(ctx, args)
        rest = args[len(before) :]
        if not rest or before[-1:] == ["--"]:
            return args
        after = self._options(ctx, rest[1:])
        command = rest[1 + len(after) :]
        if after[-1:] == ["--"]:
            after = after[:-1]
        return [*before, *after, "--", rest[0], *command]

    def _options(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The options that the words begin with, and the `--` that ends them."""
        parser = click.Command(None, params=[each for each in self.get_params(ctx) if isinstance(each, click.Option)])
        _, rest, _ = parser.make_parser(ctx).parse_args(list(args))
        return args[: len(args) - len(rest)]


class Asked(NamedTuple):
    """What is to be held."""

    name: bytes
    resources: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.resources} of {shown(self.name)}"

    def in_use(self, error: CounterdError) -> str:
        """Why there are none."""
        if isinstance(error, NotAvailable) and error.consumption is not None:
            return f"{error.consumption} of {self.maximum} are in use"
        return explain(error, None)[0]

    def environment(self, descriptor: int | None) -> dict[bytes, bytes]:
        """What the command is told, besides what it inherits."""
        told = {
            b"COUNTERD_NAME": self.name,
            b"COUNTERD_PERMITS": b"%d" % self.resources,
            b"COUNTERD_RESOURCES": b"%d" % self.resources,  # the former name
            b"COUNTERD_MAXIMUM": b"%d" % self.maximum,
        }
        if descriptor is not None:
            told[b"COUNTERD_FD"] = b"%d" % descriptor
        # Of an outer `counterctl run`, whose descriptor is not that of these permits.
        inherited = {key: value for key, value in os.environb.items() if key != b"COUNTERD_FD"}
        return inherited | told


class Ended(NamedTuple):
    """How the command has: its wait status, and whether it was made to because its permits were lost."""

    status: int
    was_ended: bool


@click.command(cls=Words, context_settings={"allow_interspersed_args": False})
@click.argument("name", type=NAME)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "-n",
    "--permits",
    "--resources",
    "resources",
    type=click.IntRange(1, NUMBER_MAX),
    default=1,
    show_default=True,
    help="How many permits to hold.",
)
@click.option(
    "-m",
    "--max",
    "maximum",
    type=click.IntRange(1, NUMBER_MAX),
    required=True,
    help="How many permits of NAME may be in use in total.",
)
@click.option(
    "-w", "--wait", type=DURATION, help="How long to wait for the permits; 0 does not wait.  [default: for ever]"
)
@click.option("--close", is_flag=True, help="Do not let the command inherit the connection.")
@click.option(
    "--on-lost",
    type=click.Choice(["term", "ignore"]),
    default="term",
    show_default=True,
    help=f"What to do when the connection and so the permits are lost: end the command (SIGTERM, and SIGKILL "
    f"{GRACE_S:g} s later), or let it continue without permits.",
)
@click.option(
    "-q", "--quiet", is_flag=True, help="Do not print that it waits, or that the permits were not available in time."
)
@pass_target
def run(
    target: Target,
    /,
    *,
    name: bytes,
    command: tuple[str, ...],
    resources: int,
    maximum: int,
    wait: float | None,
    close: bool,
    on_lost: str,
    quiet: bool,
) -> None:
    """Holds permits of NAME while COMMAND runs.

    The permits are held while the command or this process lives, even if the other one is killed; with --close, while
    this process lives. Signals are forwarded to the command. Options must precede COMMAND; `--` may stand before it.

    \b
    Exit status: that of the command; 128 plus the signal's number if a signal ended it; or
      124  the permits were not available in time
      125  this command failed: no server, a wrong option, permits lost
      126  COMMAND cannot be run
      127  COMMAND was not found

    \b
      counterctl run backups --max 2 -- rsync -a /srv backup:/srv
      counterctl run migrations --max 1 --wait 0 ./migrate || echo "another process does it"
    """
    asked = Asked(name, resources, maximum)
    if resources > maximum:
        raise Mistake(f"{asked} is more than --max {maximum}")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this, or the command, as it ends any other
    ended: Ended | None = None
    try:
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(target.connect())
            hold = take(stack, client, asked, wait, quiet=quiet)
            ended = attended(client, hold, asked, command, close=close, ends=on_lost == "term")
    except NotAvailable as error:
        within = f" within {wait:g} s" if wait else ""
        if quiet:
            raise SystemExit(EXIT_TOO_LATE) from None
        fail(f"{asked} not available{within}: {asked.in_use(error)}", EXIT_TOO_LATE)
    except (CounterdError, OSError, ValueError) as error:  # but not of giving back, once the command has ended
        if ended is None:
            fail(explain(error, target)[0], EXIT_FAILED)
    assert ended is not None
    leave(ended)


def take(stack: contextlib.ExitStack, client: Client, asked: Asked, wait: float | None, *, quiet: bool) -> Hold:
    """Waits for the permits, which are held until the stack is left. Raises NotAvailable when the time is over."""
    first = SAID_AFTER_S if wait is None else min(wait, SAID_AFTER_S)
    name, resources, maximum = asked
    try:
        return stack.enter_context(client.hold(name, resources, maximum=maximum, timeout=first))
    except (NotAvailable, ConnectionLost) as error:
        if first == wait:
            raise
        if not quiet:
            say(f"waiting for {asked}: {asked.in_use(error)}")
    left = None if wait is None else wait - first
    return stack.enter_context(client.hold(name, resources, maximum=maximum, timeout=left))


def attended(client: Client, hold: Hold, asked: Asked, command: tuple[str, ...], *, close: bool, ends: bool) -> Ended:
    """Starts the command, and sees to it until it has ended."""
    descriptor = client.fileno()
    hold.raise_if_lost()  # else the descriptor may be that of another connection
    # One more for the command, so that its number is neither that of standard input, where that is closed, nor one that
    # a script opens a file as.
    inherited = None if close else fcntl.fcntl(descriptor, fcntl.F_DUPFD, DESCRIPTOR_MIN)
    try:
        child = Child(command, asked.environment(inherited), Signals())
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        line = f"cannot run {shown(os.fsencode(command[0]))}: {error.strerror}"
        fail(line, EXIT_NOT_FOUND if missing else EXIT_CANNOT_RUN)
    finally:
        if inherited is not None:
            os.close(inherited)
    return child.attend(descriptor, f"lost the connection to {client.where}, and with it {asked}", ends=ends)


def leave(ended: Ended) -> NoReturn:
    """Ends as the command did."""
    if ended.was_ended:
        raise SystemExit(EXIT_FAILED)
    code = os.waitstatus_to_exitcode(ended.status)
    if code == -signal.SIGINT:
        undergo(signal.SIGINT)  # a shell ends the loop that this is in for this reason only
    raise SystemExit(code if code >= 0 else EXIT_SIGNAL - code)


def fail(line: str, status: int) -> NoReturn:
    say(line)
    raise SystemExit(status)


# ---- signals ----


class Taken(NamedTuple):
    """A signal that came: why (si_code), and who sent it if a process did."""

    number: int
    code: int
    sender: int

    def was_sent(self) -> bool:
        """By a process. Those of the kernel are the terminal's, and the whole process group has got them."""
        return self.code <= 0


class Signals:
    """Signals, blocked from now on and told through a pipe: for poll(), while only sigwaitinfo() says who sent one.

    They stay blocked: once the command has ended there is nobody to pass them on to, and this process ends as well.
    """

    _record = struct.Struct("iii")

    def __init__(self) -> None:
        self._numbers = PASSED_ON | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored there is no status to wait for
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)  # as it was before
        self._pipe, self._end = os.pipe()
        threading.Thread(target=self._run, daemon=True).start()

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> list[Taken]:
        """At least one: waits for it."""
        return [Taken(*fields) for fields in self._record.iter_unpack(os.read(self._pipe, 64 * self._record.size))]

    def _run(self) -> None:
        while True:
            info = signal.sigwaitinfo(self._numbers)
            os.write(self._end, self._record.pack(info.si_signo, info.si_code, info.si_pid))


def undergo(number: signal.Signals) -> None:
    """Lets a signal do to this process what it does by default, although it is blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)  # not to the process, whose signals another thread takes
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


# ---- the command ----


class Child:
    """The command: a child that nobody but attend() waits for, so until then its id is its own."""

    def __init__(self, command: tuple[str, ...], environment: dict[bytes, bytes], signals: Signals) -> None:
        """Starts it. OSError: it cannot be."""
        self.name = shown(os.fsencode(command[0]))
        self._signals = signals
        self._pid = spawn(command, environment, signals.mask)

    def attend(self, descriptor: int, lost: str, *, ends: bool) -> Ended:
        """Passes signals on, and watches the connection, until the command has ended.

        lost: what to say if the connection is. ends: that the command must not go on then.
        """
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        poller.register(descriptor, select.POLLRDHUP)  # not POLLIN: the command may use the connection
        kill_at: float | None = None
        was_ended = False
        while True:
            left = None if kill_at is None else max(kill_at - time.monotonic(), 0) * 1000
            ready = [number for number, _ in poller.poll(left)]
            if self._signals.fileno() in ready:
                for taken in self._signals.read():
                    self._pass_on(taken)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return Ended(status, was_ended)
            if descriptor in ready:
                poller.unregister(descriptor)
                with contextlib.suppress(OSError):  # nobody may be there to be told
                    say(f"{lost}: {self.name} {'is ended' if ends else 'continues without them'}")
                if ends:
                    was_ended = True
                    os.kill(self._pid, signal.SIGTERM)
                    kill_at = time.monotonic() + GRACE_S
            if kill_at is not None and time.monotonic() >= kill_at:
                os.kill(self._pid, signal.SIGKILL)
                kill_at = None

    def _pass_on(self, taken: Taken) -> None:
        """Sends it to the command, unless that has got it."""
        # What the command sends to its whole process group reaches the command, too.
        passed = taken.was_sent() and taken.sender != self._pid
        if taken.number == signal.SIGCHLD:
            return
        if passed:
            os.kill(self._pid, taken.number)
        if taken.number == signal.SIGTSTP:
            undergo(signal.SIGTSTP)  # goes on when this process is continued
            if passed:
                os.kill(self._pid, signal.SIGCONT)


def spawn(command: tuple[str, ...], environment: dict[bytes, bytes], mask: set[Any]) -> int:
    """Starts a command as execvp(3) does; it inherits what this process inherited. Returns its process id."""
    if not command[0]:  # of which Python says something else
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    try:
        return os.posix_spawnp(command[0], command, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
    except OSError as error:
        path = shutil.which(command[0])
        if error.errno != errno.ENOEXEC or path is None:
            raise
    words = ("/bin/sh", path, *command[1:])  # a script that does not say what runs it
    return os.posix_spawn(words[0], words, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
