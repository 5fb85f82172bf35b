"""Certificates for tests: an authority, and certificates of a server and of clients."""

from __future__ import annotations

import functools
import ssl
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from pathlib import Path


@functools.cache
def authority(name: str) -> trustme.CA:
    """Returns one of several authorities that do not trust each other."""
    return trustme.CA(organization_name=name)


@functools.cache
def certificate(owner: str, by: str = "ours") -> trustme.LeafCert:
    return authority(by).issue_cert(owner, common_name=owner)


@functools.cache
def server_certificate() -> trustme.LeafCert:
    return authority("ours").issue_cert("127.0.0.1", "::1", "localhost")


def server_context(*, clients: ssl.VerifyMode = ssl.CERT_NONE) -> ssl.SSLContext:
    """Makes a server's context. clients: CERT_NONE, or how clients' certificates are requested."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_certificate().configure_cert(context)
    authority("ours").configure_trust(context)
    context.verify_mode = clients
    return context


def client_context(*, own: trustme.LeafCert | None = None, trusts: str = "ours") -> ssl.SSLContext:
    """Makes a client's context. own: the client's certificate. trusts: the authority of the server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority(trusts).configure_trust(context)
    if own is not None:
        own.configure_cert(context)
    return context


class Files:
    """Paths of files. cacert: the authority. cert, key, both: of a client. server: certificate and key of a server.

    other: another authority.
    """

    def __init__(self, directory: Path) -> None:
        client = certificate("client")
        blobs = {
            "cacert": authority("ours").cert_pem,
            "cert": client.cert_chain_pems[0],
            "key": client.private_key_pem,
            "both": client.private_key_and_cert_chain_pem,
            "server": server_certificate().private_key_and_cert_chain_pem,
            "other": authority("theirs").cert_pem,
        }
        for name, blob in blobs.items():
            blob.write_to_path(str(directory / f"{name}.pem"))
        self.cacert, self.cert, self.key, self.both, self.server, self.other = (
            str(directory / f"{name}.pem") for name in blobs
        )
