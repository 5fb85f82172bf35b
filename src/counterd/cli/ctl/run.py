"""`counterctl run`: holds permits while a command runs, as flock(1) does on one machine.

Floor 5 (ARCHITECTURE.md). The command inherits the connection, so the permits are held as long as this process or the
command runs. For that reason the code in this file never shuts the socket down, which would end the connection for both
processes. The code only closes the descriptor. The code blocks signals before it starts the command, and takes the
signals one by one, so no signal is lost or taken twice.
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
from counterd.cli.ctl.holding import Permits, place_options, unavailable, waiting_is_said
from counterd.errors import CounterdError, NotAvailable

if TYPE_CHECKING:
    from counterd.client import Client, Hold

# The same as those of env(1), timeout(1) and flock(1). Lower statuses are those of the command.
EXIT_TOO_LATE = 124
EXIT_FAILED = 125
EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127

GRACE_S = 10.0  # from SIGTERM to SIGKILL, when the permits were lost
DESCRIPTOR_MIN = 10  # for the connection in the command: shell scripts use lower descriptors themselves
NUMBER_MAX = (1 << 32) - 1

PASSED_ON = {
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
}  # fmt: skip
TAKEN = PASSED_ON | {signal.SIGCHLD}
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}  # the command must not inherit that


class Mistake(click.UsageError):
    """A usage error with a special exit status, because the usual status 2 could be the status of the command."""

    exit_code = EXIT_FAILED


class Words(click.Command):
    """A command of counterctl whose options end where COMMAND begins, so that later options belong to COMMAND."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, self._with_name_last(ctx, args))
        except click.UsageError as error:
            raise Mistake(error.format_message(), error.ctx) from None

    def _with_name_last(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Moves all options before NAME, and marks their end with `--`."""
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
        """Returns the options at the beginning of the words, and the `--` after them."""
        parser = click.Command(None, params=[each for each in self.get_params(ctx) if isinstance(each, click.Option)])
        _, rest, _ = parser.make_parser(ctx).parse_args(list(args))
        return args[: len(args) - len(rest)]


def environment(asked: Permits, descriptor: int | None) -> dict[bytes, bytes]:
    """Returns the environment of the command: the inherited variables, and the variables that describe the permits."""
    told = {
        b"COUNTERD_NAME": asked.name,
        b"COUNTERD_PERMITS": b"%d" % asked.amount,
        b"COUNTERD_RESOURCES": b"%d" % asked.amount,  # the former name
        b"COUNTERD_MAXIMUM": b"%d" % asked.maximum,
    }
    if descriptor is not None:
        told[b"COUNTERD_FD"] = b"%d" % descriptor
    # An outer `counterctl run` may have set COUNTERD_FD, which is not the descriptor of these permits.
    inherited = {key: value for key, value in os.environb.items() if key != b"COUNTERD_FD"}
    return inherited | told


class Ended(NamedTuple):
    """The end of the command: its wait status, and whether it was ended because the permits were lost."""

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
    help="How many permits of NAME may be in use, by all connections together.",
)
@click.option(
    "-w", "--wait", type=DURATION, help="How long to wait for the permits; 0 does not wait.  [default: for ever]"
)
@place_options
@click.option("--close", is_flag=True, help="Do not let the command inherit the connection.")
@click.option(
    "--on-lost",
    type=click.Choice(["term", "ignore"]),
    default="term",
    show_default=True,
    help=(
        "What to do if the connection and the permits are lost. term: end the command with SIGTERM, and "
        f"{GRACE_S:g} s later with SIGKILL. ignore: let the command continue without permits."
    ),
)
@click.option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print no message while the command waits for the permits, or when the wait is over.",
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
    **place: Any,
) -> None:
    """Holds permits of NAME while COMMAND runs.

    The permits are held until COMMAND ends, even if counterctl is killed before. With --close the permits are given
    back when counterctl is killed. counterctl forwards the signals that it receives to COMMAND. Options must precede
    COMMAND. `--` is allowed between the options and COMMAND.

    \b
    Exit status: the status of COMMAND; 128 plus N if signal N ended COMMAND; or
      124  the permits were not available in time
      125  counterctl failed: no server, a wrong option, or lost permits
      126  COMMAND cannot be run
      127  COMMAND was not found

    \b
      counterctl run backups --max 2 -- rsync -a /srv backup:/srv
      counterctl run migrations --max 1 --wait 0 ./migrate || echo "another process does it"
    """
    asked = Permits(name, resources, maximum)
    if resources > maximum:
        raise Mistake(f"{asked} is more than --max {maximum}")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process as it ends any other program
    ended: Ended | None = None
    try:
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(target.connect())
            entered = client.hold(name, resources, maximum=maximum, timeout=wait, **place)
            with contextlib.nullcontext() if quiet else waiting_is_said(client, [asked], wait):
                hold = stack.enter_context(entered)
            ended = attended(client, hold, asked, command, close=close, ends=on_lost == "term")
    except NotAvailable as error:
        if quiet:
            raise SystemExit(EXIT_TOO_LATE) from None
        fail(unavailable(error, wait), EXIT_TOO_LATE)
    except (CounterdError, OSError, ValueError) as error:  # once the command has ended, giving back may fail
        if ended is None:
            fail(explain(error, target)[0], EXIT_FAILED)
    assert ended is not None
    leave(ended)


def attended(client: Client, hold: Hold, asked: Permits, command: tuple[str, ...], *, close: bool, ends: bool) -> Ended:
    """Starts the command and watches over it until it has ended."""
    descriptor = client.fileno()
    hold.raise_if_lost()  # if it is lost, the descriptor may be that of another connection
    # A duplicate for the command. Its number is neither that of a closed standard input nor one that scripts use.
    inherited = None if close else fcntl.fcntl(descriptor, fcntl.F_DUPFD, DESCRIPTOR_MIN)
    try:
        child = Child(command, environment(asked, inherited), Signals())
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        line = f"cannot run {shown(os.fsencode(command[0]))}: {error.strerror}"
        fail(line, EXIT_NOT_FOUND if missing else EXIT_CANNOT_RUN)
    finally:
        if inherited is not None:
            os.close(inherited)
    return child.attend(descriptor, f"lost the connection to {client.where}, and with it {asked}", ends=ends)


def leave(ended: Ended) -> NoReturn:
    """Ends this process in the same way as the command ended: with the same status or signal."""
    if ended.was_ended:
        raise SystemExit(EXIT_FAILED)
    code = os.waitstatus_to_exitcode(ended.status)
    if code == -signal.SIGINT:
        undergo(signal.SIGINT)  # a shell ends the loop around this process only then
    raise SystemExit(code if code >= 0 else EXIT_SIGNAL - code)


def fail(line: str, status: int) -> NoReturn:
    say(line)
    raise SystemExit(status)


# ---- signals ----


class Taken(NamedTuple):
    """A signal that was taken: its number, its si_code, and the process that sent it, if any."""

    number: int
    code: int
    sender: int

    def was_sent(self) -> bool:
        """Returns whether a process sent the signal.

        The kernel sends the signals of a terminal to the whole process group.
        """
        return self.code <= 0


class Signals:
    """Blocks signals, takes them in a thread, and writes them to a pipe.

    The thread uses sigwaitinfo(), because only this call names the sender. The pipe exists for poll(). The signals stay
    blocked until this process ends, which happens soon after the end of the command.
    """

    _record = struct.Struct("iii")

    def __init__(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, there would be no status
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)  # the former mask
        self._pipe, self._end = os.pipe()
        threading.Thread(target=self._run, daemon=True).start()

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> list[Taken]:
        """Returns the signals that were taken. Waits if there are none."""
        return [Taken(*fields) for fields in self._record.iter_unpack(os.read(self._pipe, 64 * self._record.size))]

    def _run(self) -> None:
        while True:
            info = signal.sigwaitinfo(TAKEN)
            os.write(self._end, self._record.pack(info.si_signo, info.si_code, info.si_pid))


def undergo(number: signal.Signals) -> None:
    """Applies the default action of a blocked signal to this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)  # not to the process: the other thread would take it
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


# ---- the command ----


class Child:
    """The process of the command.

    Only attend() waits for this child process, so its process id stays valid until then.
    """

    def __init__(self, command: tuple[str, ...], environment: dict[bytes, bytes], signals: Signals) -> None:
        """Starts the command. Raises OSError if the command cannot be started."""
        self.name = shown(os.fsencode(command[0]))
        self._signals = signals
        self._pid = spawn(command, environment, signals.mask)

    def attend(self, descriptor: int, lost: str, *, ends: bool) -> Ended:
        """Forwards signals to the command, and watches the connection, until the command has ended.

        lost: the message for a lost connection. ends: whether a lost connection ends the command.
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
                with contextlib.suppress(OSError):  # stderr may be closed
                    say(f"{lost}: {self.name} {'is ended' if ends else 'continues without them'}")
                if ends:
                    was_ended = True
                    os.kill(self._pid, signal.SIGTERM)
                    kill_at = time.monotonic() + GRACE_S
            if kill_at is not None and time.monotonic() >= kill_at:
                os.kill(self._pid, signal.SIGKILL)
                kill_at = None

    def _pass_on(self, taken: Taken) -> None:
        """Sends a signal to the command, unless the command has received it already."""
        # A signal that the command sends to its own process group reaches the command itself too.
        passed = taken.was_sent() and taken.sender != self._pid
        if taken.number == signal.SIGCHLD:
            return
        if passed:
            os.kill(self._pid, taken.number)
        if taken.number == signal.SIGTSTP:
            undergo(signal.SIGTSTP)  # returns when this process is continued
            if passed:
                os.kill(self._pid, signal.SIGCONT)


def spawn(command: tuple[str, ...], environment: dict[bytes, bytes], mask: set[Any]) -> int:
    """Starts a command as execvp(3) does.

    The command inherits what this process inherited. Returns the process id of the command.
    """
    if not command[0]:  # Python would raise another exception
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    try:
        return os.posix_spawnp(command[0], command, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
    except OSError as error:
        path = shutil.which(command[0])
        if error.errno != errno.ENOEXEC or path is None:
            raise
    words = ("/bin/sh", path, *command[1:])  # a script without #!
    return os.posix_spawn(words[0], words, environment, setsigmask=mask, setsigdef=IGNORED_BY_PYTHON)
