#!/bin/sh
# Says which system packages are missing, all of them, before a build fails in a less helpful way.
set -u
PYTHON=${PYTHON:-python3}
missing=0
need() { echo "counterd: $1; on Debian or Ubuntu: apt-get install $2" >&2; missing=1; }

if ! command -v "$PYTHON" >/dev/null 2>&1; then
    need "no $PYTHON" "python3 python3-venv python3-dev"
elif ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "counterd: $("$PYTHON" --version) is too old, 3.10 or newer is needed (make PYTHON=python3.11 ...)" >&2
    missing=1
else
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || need "$PYTHON has no venv module" python3-venv
    header=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [ -f "$header" ] || need "no header $header" python3-dev
fi
compiler=${CC:-cc}
command -v "${compiler%% *}" >/dev/null 2>&1 || need "no C compiler ($compiler)" build-essential
if [ "$missing" = 0 ] && ! echo '#include <stdlib.h>' | $compiler -E -x c - >/dev/null 2>&1; then
    need "$compiler finds no C library headers" libc6-dev
fi
exit "$missing"
