#!/bin/sh
# Runs a command as if the machine had started so many seconds ago: `sh tools/uptime.sh 5 COMMAND...`. The clock that the
# daemon and the clients go by counts from there, in a time namespace: Linux 5.6, util-linux 2.36 (for an ordinary user
# 2.38, and user namespaces have to be permitted). The time of day is that of the machine.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: sh tools/uptime.sh SECONDS COMMAND..." >&2
    exit 2
fi
wanted=$1
shift
boot=$(cut -d. -f1 /proc/uptime)
monotonic=$(python3 -c 'import time; print(int(time.monotonic()))')  # less, where the machine has slept
if [ "$(id -u)" = 0 ]; then
    set -- --fork "$@"
else
    set -- --user --map-current-user --fork "$@"
fi
exec unshare --time --monotonic "$((wanted - monotonic))" --boottime "$((wanted - boot))" --kill-child "$@"
