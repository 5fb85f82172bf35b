"""`counterd` and `python -m counterd`: starts the daemon. Importing the daemon's modules takes half a second."""

import signal
import sys


def main() -> int:
    """Runs the command and returns its exit status."""
    for number in (signal.SIGHUP, signal.SIGUSR1):  # until the daemon handles them, their default would end the process
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1:2] == ["journal"]:
        from counterd.cli import journal  # noqa: PLC0415

        return journal.main(sys.argv[2:])
    from counterd.cli import daemon  # noqa: PLC0415

    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
