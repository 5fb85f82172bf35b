#!/bin/bash
# Runs tests twice for callers whose environment is odd: another umask, locale, time zone, terminal, home and folder for
# temporary files, no variables of Python, and stray ones that commands read. The first time on a dumb terminal; the
# second time on a modern one, and, if root calls it, as an ordinary user with a copy of what git tracks.
#
#   tools/hostile.sh PYTHON [ARGUMENTS OF PYTEST]
#
# HOSTILE_UID=65534 is that user; nothing else may run as it meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# = 0 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
python=$(realpath -s "$1")
shift
if [ $# = 0 ]; then
    set -- -n 4 --dist worksteal --part daemon tests/unit/cli tests/unit/control tests/unit/journal tests/functional
fi
uid=${HOSTILE_UID:-65534}

odd=$(mktemp -d /tmp/hostile-XXXXXX)
trap 'rm -rf "$odd"' EXIT
chmod 755 "$odd"
long="$odd/a folder with a space, and with a name so long that no socket has room for it: $(printf 'x%.0s' {1..100})"
mkdir -m 777 "$long" "$odd/home"
umask 077

# kept: what needs.py asks for, and how much is tested
variables=(
    PATH="$PATH" ${COUNTERD_EXAMPLES:+COUNTERD_EXAMPLES="$COUNTERD_EXAMPLES"}
    LANG=C LC_ALL=C TZ=Pacific/Chatham TMPDIR="$long" COLUMNS=31 LINES=7
    COUNTERD_URL=counterd://192.0.2.1 COUNTERD_ADMIN=http://192.0.2.1 COUNTERD_ADMIN_TOKEN=stray COUNTERD_FD=0
    BEANSTALK_URL=beanstalk://192.0.2.1 THROTTR_URL=throttr://192.0.2.1 SENTINEL_URL=sentinel://192.0.2.1
    SMOCKRON_URL=smockron://192.0.2.1 NOTIFY_SOCKET=/nonexistent LISTEN_FDS=3 WATCHDOG_USEC=1
    http_proxy=http://192.0.2.1:1 HTTPS_PROXY=http://192.0.2.1:1 all_proxy=http://192.0.2.1:1
)

status=0
echo "==== hostile: TERM=dumb, NO_COLOR"
env -i "${variables[@]}" ${CI:+CI="$CI"} HOME=/nonexistent TERM=dumb NO_COLOR=1 "$python" -m pytest "$@" || status=$?

as=()
if [ "$(id -u)" = 0 ]; then
    mkdir -m 755 "$odd/tree"
    (umask 022; git ls-files -z | xargs -0 cp -d --parents -t "$odd/tree")
    chown -R "$uid:$uid" "$odd/tree"
    as=(setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --inh-caps=-all)
    cd "$odd/tree"
    # Root may have its Python in its home, which others cannot enter: they get a view in which it has nothing else.
    base=$("$python" -c 'import sys; print(sys.base_prefix)')
    case $base in
        /root/*)
            mkdir "$odd/python"
            as=(
                unshare --mount --propagation private sh -c '
                    umask 022
                    mount --bind "$0" "$1/python" && mount -t tmpfs -o mode=755 tmpfs /root && mkdir -p "$0" &&
                    mount --bind "$1/python" "$0" && shift && umask 077 && exec "$@"' "$base" "$odd" "${as[@]}"
            ) ;;
    esac
    "${as[@]}" sh -c '"$0" -c "import counterd._core"' "$python" || {
        echo "hostile: user $uid cannot run $python" >&2
        exit 2
    }
fi
echo "==== hostile: TERM=xterm-kitty, FORCE_COLOR${as[0]:+, uid $uid}"
env -i "${variables[@]}" HOME="$odd/home" TERM=xterm-kitty COLORTERM=truecolor FORCE_COLOR=1 \
    "${as[@]}" "$python" -m pytest "$@" || status=$?  # without CI, as tests that need root are skipped
exit "$status"
