#!/bin/bash
# Proves that a fresh machine needs what README.md names and nothing else: makes a clean Debian, installs those packages,
# clones this repository (what is committed), then `make run` until a permit is held, and `make test`; as root and as an
# ordinary user. Needs root, debootstrap and git.
#
#   tools/fresh.sh [--root-only | --user-only] [--times N] [--deps] [--no-run] [--suite bookworm] [--] [ARGUMENTS OF PYTEST]
#
# --times: so many runs of `make test` in a row. --deps: then `make test-deps`, and the tests once more with CI set, so that
# one without a package fails. --no-run: the tests alone. COUNTERD_BUILD and JOBS are passed on. build/fresh keeps the clean
# Debian and that with README's packages; remove it to have them made anew.
#
# All mounts are in a mount namespace of its own and all processes in a PID namespace, which end with it. Of this machine
# it has the network, the apt sources that serve the suite, apt's proxies and keys, and pip's configuration with the files
# and folders that are named there, read-only.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=$PWD/build/fresh
suite=bookworm
users=(root user)
times=1
deps=
run=yes
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --root-only) users=(root) ;;
        --user-only) users=(user) ;;
        --times) times=$2; shift ;;
        --deps) deps=yes ;;
        --no-run) run= ;;
        --suite) suite=$2; shift ;;
        --help | -h) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit ;;
        --) shift; arguments+=("$@"); break ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
given=
if [ ${#arguments[@]} -gt 0 ]; then
    given=$(printf '%q ' "${arguments[@]}")
fi

step() { printf '\n==== fresh: %s (%s s)\n' "$*" "$SECONDS"; }
die() { echo "fresh: $*" >&2; exit 2; }

# ---- outside: the folder, which is removed however the rest ends ------------------------------------------------------

if [ -z "${FRESH_ROOT:-}" ]; then
    [ "$(id -u)" = 0 ] || die "only root can make a Debian to change its root to"
    for program in debootstrap git unshare; do
        command -v "$program" >/dev/null || die "no $program; on Debian or Ubuntu: apt-get install debootstrap git util-linux"
    done
    mkdir -p "$cache"
    FRESH_ROOT=$(mktemp -d "$cache/root.XXXXXX")
    chmod 755 "$FRESH_ROOT"
    export FRESH_ROOT
    trap 'rm -rf --one-file-system "$FRESH_ROOT"' EXIT
    words=(--suite "$suite" --times "$times" ${deps:+--deps})
    [ -n "$run" ] || words+=(--no-run)
    [ ${#users[@]} = 2 ] || words+=("--${users[0]}-only")
    unshare --mount --propagation private --pid --fork --kill-child \
        bash "tools/${0##*/}" "${words[@]}" -- ${arguments[@]+"${arguments[@]}"} </dev/null
    exit
fi

# ---- inside the namespaces -------------------------------------------------------------------------------------------

root=$FRESH_ROOT
venv=.venv
if [ "${COUNTERD_BUILD:-release}" != release ]; then
    venv=.venv-$COUNTERD_BUILD
fi

# "URI suite component" of each source of this machine that serves the suite, or that of Debian.
sources() {
    local found
    found=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
        sort -u | awk -v suite="$suite" 'index($2, suite) == 1') || true
    printf '%s\n' "${found:-http://deb.debian.org/debian $suite main}"
}

carry_apt() {
    sources | sed 's/^/deb /' >"$root/etc/apt/sources.list"
    apt-config dump Acquire >"$root/etc/apt/apt.conf.d/90carried" 2>/dev/null || true
    local folder
    for folder in trusted.gpg.d auth.conf.d keyrings; do
        if [ -d "/etc/apt/$folder" ]; then
            cp -rn "/etc/apt/$folder" "$root/etc/apt/"
        fi
    done
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
}

# A file or folder of this machine, at the same place and read-only. Of an index, that beside it has the files.
carry() {
    local path=${1%/}
    path=${path%/simple}
    if mountpoint -q "$root$path"; then
        return
    fi
    if [ -d "$path" ]; then
        mkdir -p "$root$path"
    else
        mkdir -p "$root${path%/*}" && touch "$root$path"
    fi
    mount --bind "$path" "$root$path" && mount -o remount,bind,ro "$root$path"
}

# pip's configuration, from files and environment, as an environment: one NAME=VALUE a line.
pip_environment() {
    python3 - <<'PYTHON'
import ast, subprocess, sys

said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
merged = {}
for line in said.splitlines():  # the later ones prevail: :env: has to
    name, _, value = line.partition("=")
    merged.setdefault(name.rpartition(".")[2], {})[name.startswith(":env:")] = ast.literal_eval(value)
for name, values in merged.items():
    print(f"PIP_{name.upper().replace('-', '_')}={' '.join(str(values.get(True, values.get(False))).split())}")
PYTHON
}

carry_pip() {
    local line word
    environment=()
    while read -r line; do
        environment+=("$line")
        for word in ${line#*=}; do
            word=${word#file://}
            if [ "${word#/}" != "$word" ] && [ -e "$word" ]; then
                carry "$word"
            fi
        done
    done < <(pip_environment)
    for word in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY COUNTERD_BUILD JOBS; do
        if [ -n "${!word:-}" ]; then
            environment+=("$word=${!word}")
        fi
    done
}

mount_system() {
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    local name
    for name in null zero full random urandom tty; do
        touch "$root/dev/$name" && mount --bind "/dev/$name" "$root/dev/$name"
    done
    mkdir "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
}

# Runs a shell command there, as one of the users, in the clone.
inside() {
    local user=$1 id=0 home=/root
    if [ "$user" != root ]; then
        id=1000 home=/home/$user
    fi
    chroot --userspec="$id:$id" --groups="$id" "$root" /usr/bin/env -i ${environment[@]+"${environment[@]}"} \
        HOME="$home" USER="$user" LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        sh -c "cd ~ && if [ -d counterd ]; then cd counterd; fi && $2"
}

# What README.md says has to be installed.
packages=$(tr '\n' ' ' <README.md | grep -o '`apt-get install python3-venv[^`]*`' | head -n 1 | tr -d '`' | cut -d' ' -f3-)
[ -n "$packages" ] || die "README.md does not say what has to be installed"

ready=$cache/$suite-$(printf '%s' "$packages" | cksum | cut -d' ' -f1).tar
if [ ! -f "$ready" ]; then
    if [ ! -f "$cache/$suite.tar" ]; then
        step "a clean Debian, $suite"
        debootstrap --variant=minbase "$suite" "$root" "$(sources | awk -v suite="$suite" '$2 == suite { print $1; exit }')" \
            >"$cache/debootstrap.log" || die "debootstrap failed; see build/fresh/debootstrap.log"
        tar -C "$root" --one-file-system -cf "$cache/$suite.tar.part" . && mv "$cache/$suite.tar.part" "$cache/$suite.tar"
    else
        tar -C "$root" -xf "$cache/$suite.tar"
    fi
    chmod 755 "$root"
    step "what README.md names: $packages"
    carry_apt
    environment=(DEBIAN_FRONTEND=noninteractive)
    inside root "apt-get update -qq && apt-get install -y -qq $packages >/dev/null 2>&1 && apt-get clean"
    tar -C "$root" --one-file-system -cf "$ready.part" . && mv "$ready.part" "$ready"
else
    tar -C "$root" -xf "$ready"
    chmod 755 "$root"
    carry_apt
fi

mount_system
chroot "$root" useradd --create-home --uid 1000 user
carry_pip

# Until the daemon of `make run` answers and a permit is held. Other ports where README's are in use on this machine.
try_run() {
    local user=$1 port admin words= started
    read -r port admin < <(python3 - <<'PYTHON'
import socket

def free(wanted):
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", wanted))
            return probe.getsockname()[1]
    except OSError:
        return free(0)

print(free(11215), free(11216))
PYTHON
    )
    if [ "$port $admin" != "11215 11216" ]; then
        words="ARGS='--set counter.port=$port --set admin.bind=127.0.0.1:$admin'"
    fi
    printf 'echo $$ >/tmp/run.pid\nexec make run %s\n' "$words" >"$root/tmp/run.sh"
    rm -f "$root/tmp/run.pid"
    inside "$user" "exec setsid sh /tmp/run.sh" &
    started=$!
    while ! inside "$user" "$venv/bin/python -c '
from counterd.client import Client
with Client(\"127.0.0.1\", $port) as client, client.hold(\"fresh\", maximum=1, timeout=1):
    assert client.get(\"fresh\") == 1
    print(\"fresh: a permit is held\")
'" 2>"$cache/run.log"; do
        kill -0 "$started" 2>/dev/null || { cat "$cache/run.log"; return 1; }
        sleep 1
    done
    kill -TERM -- "-$(cat "$root/tmp/run.pid")"
    wait "$started" || true
}

status=0
for user in "${users[@]}"; do
    home=$(chroot "$root" sh -c "echo ~$user")
    git clone --quiet --no-hardlinks . "$root$home/counterd"
    chroot "$root" chown -R "$user:$user" "$home/counterd"
    if [ -n "$run" ]; then
        step "make run, as $user"
        try_run "$user" || { echo "fresh: make run fails as $user" >&2; status=1; continue; }
    fi
    for turn in $(seq "$times"); do
        step "make test, as $user, $turn of $times"
        inside "$user" "make test ARGS=$(printf '%q' "$given")" || { echo "fresh: make test fails as $user" >&2; status=1; }
    done
    if [ -n "$deps" ]; then
        step "make test-deps, then make test in CI, as $user"
        inside root "make test-deps" || status=1
        inside "$user" "CI=true make test ARGS=$(printf '%q' "$given")" ||
            { echo "fresh: make test fails as $user with all packages" >&2; status=1; }
    fi
done
step "$([ "$status" = 0 ] && echo passed || echo failed)"
exit "$status"
