"""The environment of the tests, and of the processes that they start: the same whoever runs them, and wherever.

make() is called before anything else reads a variable. Of the caller's variables those in KEPT remain. The tests have a
home and a folder for temporary files of their own: in /tmp, with a short path, because paths of Unix sockets are short.
The processes of xdist inherit all of this.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

KEPT = frozenset(
    {
        "PATH",
        "CI",  # what is missing is a failure: needs.py
        "COUNTERD_BUILD", "COUNTERD_EXAMPLES", "LEAK_CONNECTIONS", "SENTINEL_REFERENCE",  # for those who run the tests
        "CC", "CFLAGS", "LDFLAGS", "CCACHE_DIR", "CCACHE_NOHASHDIR",  # some tests compile
        "LD_LIBRARY_PATH", "LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS", "PYTHONMALLOC",  # tools/asan.sh
        "COUNTERD_MUTANT", "COUNTERD_MUTANT_AT",  # tools/mutants.py
        "PYTHONDONTWRITEBYTECODE",  # the Makefile decides
    }
)  # fmt: skip
FIXED = {"LANG": "C.UTF-8", "TZ": "UTC", "TERM": "xterm-256color"}
PLACE = "/tmp"
FAILED_MAX = 3  # folders of earlier runs that are kept: a run in which a test failed leaves its folder
OLD_S = 86_400  # a container that shares /tmp has other processes: they seem to have ended
FOLDER = re.compile(r"counterd-([0-9]+)-\w+")

caller: dict[str, str] = {}  # the variables of the caller; in processes of xdist those that they were started with


def make() -> Path:
    """Makes the environment, unless it was made by the process that started this one. Returns the tests' folder."""
    caller.update(os.environ)
    import readline  # noqa: F401  (it puts the size of the terminal where only processes that are started see it)

    for name in ("LINES", "COLUMNS"):
        os.unsetenv(name)
    found = Path(caller.get("TMPDIR", ""))
    match = FOLDER.fullmatch(found.name)
    if match and int(match[1]) == os.getppid() and "PYTEST_XDIST_WORKER" in caller:
        return found
    _remove_old()
    folder = Path(tempfile.mkdtemp(prefix=f"counterd-{os.getpid()}-", dir=found if match else PLACE))
    folder.chmod(0o711)  # daemons that change their user pass through
    home = folder / "home"
    home.mkdir()
    for name in caller.keys() - KEPT:
        del os.environ[name]
    os.environ.update(FIXED, HOME=str(home), TMPDIR=str(folder))
    tempfile.tempdir = None  # it is read again
    time.tzset()
    os.umask(0o022)
    return folder


def is_colored() -> bool | None:
    """Returns whether the caller's variables ask for colors; None if they say nothing."""
    if caller.get("NO_COLOR") or caller.get("TERM") == "dumb":
        return False
    return True if caller.get("FORCE_COLOR") else None


def _remove_old() -> None:
    """Removes the folders of this user's runs that have ended long ago, but for the newest."""
    ended = []
    for path in Path(PLACE).iterdir():
        match = FOLDER.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # another run removes it
            if match and path.stat().st_uid == os.geteuid() and not Path("/proc", match[1]).exists():
                ended.append((path.stat().st_mtime, path))
    for modified, path in sorted(ended)[:-FAILED_MAX]:
        if time.time() - modified > OLD_S:
            shutil.rmtree(path, ignore_errors=True)
