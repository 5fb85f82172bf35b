"""The command `counterd`, which runs the daemon.

Floor 5 (ARCHITECTURE.md). Exit status: 0 after a drain; 1 after a second signal, or if the start fails because the
system has no thread or memory left; 2 for mistakes in the command line or the configuration, with a line for each
mistake.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from counterd.control.config import loading as configuration
from counterd.control.config.loading import Config, ConfigError
from counterd.control.log import LogWriter, install
from counterd.control.process.daemon import Daemon
from counterd.control.process.systemd import passed_sockets
from counterd.control.service import prepare_all
from counterd.control.threads import SWITCH_INTERVAL_S, NoThread
from counterd.extensions.host import PluginHost, find_extensions
from counterd.protocols import find_protocols
from counterd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.contract import ProtocolSpec

EXIT_CONFIG = 2
EXIT_LACKS = 1
NO_MEMORY = "out of memory: is the address space of the process limited?"
LEAVE_S = 1.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="counterd",
        description="Hands out permits for shared, limited resources, and takes them back when a client dies.",
        epilog=(
            "Without -c, counterd reads /etc/counterd/counterd.conf. If that file does not exist, it reads the "
            "file in its package. `counterd journal --help` describes the commands for a journal file."
        ),
    )
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="the configuration file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=("override a key; the option can be repeated"),
    )
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument("--version", action="version", version=f"counterd {__version__}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `counterd`. Returns its exit status."""
    options = parse(arguments)
    specs = find_protocols()

    try:
        passed = passed_sockets()
    except OSError as error:
        print(f"{configuration.PASSED}: {error}", file=sys.stderr)
        return EXIT_CONFIG

    def read(pipe_timeout: float = 0.0) -> Config:
        # A configuration in a pipe can be read only once, at the start. At a reload nobody may write to it any more.
        path = configuration.find_file(options.config)
        return configuration.load(path, options.overrides, specs, passed, pipe_timeout)

    try:
        config = read(configuration.PIPE_TIMEOUT_S)
        if options.check:
            check(config, [spec for spec in specs if config.listener(spec.name).enable])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    if options.check:
        for warning in config.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(f"{config.path}: ok")
        return 0
    return serve(config, specs, read)


def check(config: Config, specs: Sequence[ProtocolSpec]) -> None:
    """Checks the files and the extensions that the settings of protocols name. Raises ConfigError."""
    problems = [problem for spec in specs for problem in find_extensions(spec, config)[1]]
    try:
        prepare_all(specs, config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def prepare_process() -> None:
    """Prepares the process: opens the standard streams, enables faulthandler, and sets the switch interval."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it is closed: the first socket would get its number, and messages would be written to it
            os.open(os.devnull, os.O_RDWR)
    faulthandler.enable(file=2)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def serve(config: Config, specs: Sequence[ProtocolSpec], reread: Callable[[], Config]) -> int:
    """Runs the daemon until a signal ends it. Returns the exit status."""
    prepare_process()
    writer = LogWriter(config.process.log.level, config.process.log.format)
    install(writer)
    try:
        try:
            daemon = Daemon(config, specs, writer, reread, PluginHost)
        finally:
            writer.start()  # not before: a thread keeps the privileges that the process had when it was started
        loop = uvloop.new_event_loop()
        loop.run_until_complete(daemon.run())
        loop.close()
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")  # one write for a line: another thread writes the log there too
        return leave(EXIT_CONFIG)
    except (NoThread, MemoryError) as error:  # the next start may succeed
        sys.stderr.write(f"{error if isinstance(error, NoThread) else NO_MEMORY}\n")
        return leave(EXIT_LACKS)
    finally:
        writer.close()
    return leave(0)


def leave(status: int) -> int:
    """Returns the exit status, and makes sure that the process ends even if threads of an extension still run."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        timer = threading.Timer(LEAVE_S, os._exit, (status,))
        timer.daemon = True
        timer.start()
    return status
