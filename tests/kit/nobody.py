"""A daemon that becomes another user, also if root has its Python in its home, which others cannot enter.

The daemon gets a view of the file system in which everybody can enter PLACE, and root's home has nothing but Python.
`own` in PLACE is a folder of the user nobody, and `roots` is one of root. Needs "mounts".
"""

from __future__ import annotations

import sys

from kit.daemon import MODULE

PLACE = "/mnt"

AS_NOBODY = """
mount -t tmpfs -o mode=755 tmpfs "$0" && mkdir "$0/python" "$0/packages" || exit
case $1$2 in
    */root/*)
        mount --bind "$1" "$0/python" && mount --bind "$2" "$0/packages" && mount -t tmpfs -o mode=755 tmpfs /root &&
        mkdir -p "$1" "$2" && mount --bind "$0/python" "$1" && mount --bind "$0/packages" "$2" || exit ;;
esac
mkdir -m 700 "$0/own" && chown nobody "$0/own" && mkdir -m 755 "$0/roots" || exit
shift 2
exec "$@"
"""
PROGRAM = (
    "unshare", "--mount", "--propagation", "private",
    "sh", "-c", AS_NOBODY, PLACE, sys.base_prefix, sys.prefix, *MODULE,
)  # fmt: skip
