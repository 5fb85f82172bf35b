#!/bin/sh
# Runs a command so many times in a row while a busy loop takes each core, and says how often it failed:
# `sh tools/repeat.sh 10 COMMAND...`. What the N-th run said is in build/repeat/N.log. Whatever fails depends on the load.
set -eu
RUN_MAX_S=3600
if [ $# -lt 2 ]; then
    echo "usage: sh tools/repeat.sh RUNS COMMAND..." >&2
    exit 2
fi
runs=$1
shift
mkdir -p build/repeat
rm -f build/repeat/*.log

loops=
end() { kill $loops 2>/dev/null || true; }
trap end EXIT
trap 'exit 130' INT TERM
core=0
while [ "$core" -lt "$(nproc)" ]; do
    sh -c 'while :; do :; done' &
    loops="$loops $!"
    core=$((core + 1))
done

failed=0
run=1
while [ "$run" -le "$runs" ]; do
    begun=$(date +%s)
    log=build/repeat/$run.log
    if timeout "$RUN_MAX_S" "$@" >"$log" 2>&1 </dev/null; then
        result=passed
    else
        result="FAILED with status $?, see $log"
        failed=$((failed + 1))
    fi
    echo "run $run of $runs: $result, $(($(date +%s) - begun)) s"
    grep -E '^(FAILED|ERROR) ' "$log" || true
    run=$((run + 1))
done
echo "$failed of $runs runs failed"
[ "$failed" = 0 ]
