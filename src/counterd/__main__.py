"""`counterd` and `python -m counterd`: starts the daemon. Importing its parts takes half a second."""

import signal
import sys


def main() -> int:
    """Runs the command; returns its exit status."""
    for number in (signal.SIGHUP, signal.SIGUSR1):  # by default they would end the process before it is ready
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1:2] == ["journal"]:
        from counterd.cli import journal  # noqa: PLC0415

        return journal.main(sys.argv[2:])
    from counterd.cli import daemon  # noqa: PLC0415

    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
