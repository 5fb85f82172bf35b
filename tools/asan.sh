#!/bin/sh
# The tests under AddressSanitizer and UndefinedBehaviorSanitizer: every access to the region and to buffers is checked.
#
#     sh tools/asan.sh PYTHON DIRECTORY [pytest's arguments]
#
# PYTHON: of an environment with a debug build whose CFLAGS had -fsanitize=address,undefined. The daemons that the tests
# start inherit it all; whatever a sanitizer reports goes into DIRECTORY, whoever of them it was, and is an error.
set -eu

python=$1
reports=$2
shift 2
mkdir -p "$reports"
rm -f "$reports"/report.*
reports=$(cd "$reports" && pwd)

# Python itself is not instrumented, so the runtimes have to be there before it. It never frees all it has, so leaks are
# left to tests/functional/test_leaks.py; malloc in place of its own allocator, so that each object has its redzones.
preload=
for library in libasan.so libubsan.so libstdc++.so.6; do
    preload="$preload $(gcc -print-file-name=$library)"
done

if [ $# -eq 0 ]; then
    set -- tests/unit/net tests/unit/protocols tests/unit/test_*.py tests/property tests/conformance tests/functional
fi

# Left out: a limit on address space, of which ASan's shadow takes 16 TiB (3); bounds on resident memory, which the
# quarantine of freed memory exceeds (the slow readers', and what a connection leaves behind); a SIGSEGV that a command
# sends itself, or that a method which begins no call dies of, as ASan reports these as its own; and the page, as the
# browser has an allocator of its own.
status=0
LD_PRELOAD=$preload PYTHONMALLOC=malloc \
    ASAN_OPTIONS="detect_leaks=0:log_path=$reports/report" \
    UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/report" \
    "$python" -m pytest -q -n 2 --dist worksteal -p no:cacheprovider \
    --deselect tests/unit/protocols/counter/test_counters.py::test_a_store_without_memory_raises_memory_error \
    --deselect tests/unit/test_core.py::test_a_method_that_begins_no_call_ends_the_process_of_a_debug_build \
    --deselect tests/functional/test_start.py::test_memory_that_cannot_be_had \
    --deselect tests/functional/test_start.py::test_without_memory_for_reads \
    --deselect tests/functional/test_slow_readers.py::test_memory_is_bounded_and_others_are_served \
    --deselect tests/functional/test_slow_readers.py::test_memory_is_bounded_when_the_replies_are_much_longer \
    --deselect tests/functional/test_slow_readers.py::test_memory_is_bounded_when_requests_come_faster_than_they_can_be_answered \
    --deselect tests/functional/test_slow_readers.py::test_fifty_megabytes_of_requests_wait_for_their_reader \
    --deselect tests/functional/test_leaks.py \
    --deselect "tests/functional/test_counterctl_run.py::test_a_command_that_a_signal_ended[11]" \
    --deselect tests/functional/test_dashboard.py \
    "$@" || status=$?

found=$(find "$reports" -name 'report.*' | wc -l)
find "$reports" -name 'report.*' -exec cat {} +
echo "asan: pytest's exit status $status, $found reports of sanitizers"
[ "$status" -eq 0 ] && [ "$found" -eq 0 ]
