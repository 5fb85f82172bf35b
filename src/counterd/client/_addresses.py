"""Addresses of servers. An address is a host and a port, the path of a Unix socket, or a URL that has one of these,
with or without TLS.

Floor: side (ARCHITECTURE.md); shared by the clients. This file touches no socket, and imports ssl only when it is
needed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

HOST = "127.0.0.1"
VARIABLE = "COUNTERD_URL"  # the environment variable with the address of the counter protocol's server
PORT_MAX = 65535


class Tls(NamedTuple):
    """TLS with these PEM files.

    cacert: "" means the certificates that this system trusts. key: "" means that the key is in the file cert.
    """

    cacert: str = ""
    cert: str = ""
    key: str = ""


class Address(NamedTuple):
    """The host and port of a TCP address, or the path of a Unix socket; unused fields are "" or 0.

    tls: None means no TLS.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    tls: Tls | ssl.SSLContext | None = None

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def make_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context for a connection, or None without TLS. Raises OSError if a file cannot be used."""
        if self.tls is None:
            return None
        from counterd.client import _tls  # noqa: PLC0415 - ssl takes as long to import as all else

        return _tls.make_context(self.tls)


def read_addresses(
    hosts: str | Sequence[str],
    port: int,
    path: str | os.PathLike[str] | None,
    scheme: str = "counter",
    tls: bool | ssl.SSLContext = False,
) -> list[Address]:
    """Returns the addresses in the arguments of a client: the path alone if there is one, else each host or URL.

    Raises ValueError for a URL of another scheme, an impossible port, TLS with a Unix socket, or if there is no
    address.
    """
    if isinstance(port, int) and not 0 <= port <= PORT_MAX:  # getaddrinfo() would take it modulo 65536
        raise ValueError(f"port must be 0 to {PORT_MAX}, not {port}")
    if path is not None:
        found = [Address(path=os.fsdecode(path))] if os.fsdecode(path) else []
    else:
        found = [read_address(host, port, scheme) for host in ([hosts] if isinstance(hosts, str) else hosts)]
    if not found:
        raise ValueError("no address to connect to")
    return [with_tls(address, tls) for address in found] if tls else found


def read_default(
    host: str | Sequence[str] | None,
    port: int | None,
    path: str | os.PathLike[str] | None,
    tls: bool | ssl.SSLContext = False,
    *,
    default_port: int,
) -> list[Address]:
    """Does the same as read_addresses(), with a default.

    If no argument has an address, returns the addresses in COUNTERD_URL, or the address of this host.
    """
    if host is None and port is None and path is None and os.environ.get(VARIABLE):
        try:
            return read_addresses(os.environ[VARIABLE], default_port, None, tls=tls)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None
    return read_addresses(HOST if host is None else host, default_port if port is None else port, path, tls=tls)


def with_tls(address: Address, tls: bool | ssl.SSLContext) -> Address:
    """Returns the same address with TLS.

    Raises ValueError if the address is a Unix socket, or if it names TLS files and `tls` is a context.
    """
    if address.path:
        raise ValueError(f"{address.path}: a Unix socket cannot use TLS")
    if isinstance(tls, bool):
        return address if address.tls else address._replace(tls=Tls())
    if not hasattr(tls, "wrap_bio"):
        raise TypeError(f"tls must be True, False or an ssl.SSLContext, not {tls!r}")
    if address.tls not in (None, Tls()):
        raise ValueError(f"{address}: the URL names files for TLS, so tls cannot be a context")
    return address._replace(tls=tls)


def read_address(text: str, port: int, scheme: str = "counter") -> Address:
    """Reads one address: a host, SCHEME://HOST[:PORT], SCHEMEs://HOST[:PORT][?cacert=FILE&cert=FILE&key=FILE] or
    SCHEME+unix:///PATH.

    port: the default port. Raises ValueError with the text of the address.
    """
    if "://" not in text:
        if text.count(":") == 1 or text.startswith("["):  # an IPv6 address has two colons at least
            raise ValueError(f"{text!r}: expected a host without a port, or {scheme}://{text}")
        return Address(_checked(text, text), port)
    try:
        url = urlsplit(text)
        said = url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    rest = url.fragment or url.username or url.password
    secure = url.scheme == f"{scheme}s"
    if url.scheme == f"{scheme}+unix":
        if url.netloc or url.query or rest or len(url.path) < 2:
            raise ValueError(f"{text!r}: expected {scheme}+unix:///PATH")
        return Address(path=os.fsdecode(unquote_to_bytes(url.path)))
    if url.scheme not in (scheme, f"{scheme}s") or not url.hostname or rest or url.path not in ("", "/"):
        raise ValueError(f"{text!r}: expected {scheme}://HOST:PORT, {scheme}s://HOST:PORT or {scheme}+unix:///PATH")
    if url.query and not secure:
        raise ValueError(f"{text!r}: nothing may follow HOST:PORT in a {scheme}:// URL")
    tls = _read_query(text, url.query, scheme) if secure else None
    return Address(_checked(url.hostname, text), port if said is None else said, tls=tls)


def _checked(host: str, text: str) -> str:
    """Returns the host.

    Raises ValueError if no lookup of the host can succeed, because such a lookup would not raise an OSError.
    """
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{text!r}: {host!r} is not a valid host name: {error}") from None
    return host


def _read_query(text: str, query: str, scheme: str) -> Tls:
    said = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    files = dict(said)
    if len(files) < len(said) or not files.keys() <= {*Tls._fields} or not all(files.values()):
        raise ValueError(
            f"{text!r}: expected {scheme}s://HOST:PORT?cacert=FILE&cert=FILE&key=FILE, or fewer parameters"
        )
    if "key" in files and "cert" not in files:
        raise ValueError(f"{text!r}: key needs cert")
    return Tls(**files)
