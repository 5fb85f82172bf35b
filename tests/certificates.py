"""Certificates for tests: one authority for all, and what a server and its clients need of it."""

from __future__ import annotations

import functools
import ssl
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from pathlib import Path


@functools.cache
def authority(name: str) -> trustme.CA:
    """One of several that do not trust each other."""
    return trustme.CA(organization_name=name)


@functools.cache
def certificate(owner: str, by: str = "ours") -> trustme.LeafCert:
    return authority(by).issue_cert(owner, common_name=owner)


@functools.cache
def server_certificate() -> trustme.LeafCert:
    return authority("ours").issue_cert("127.0.0.1", "::1", "localhost")


def server_context(*, clients: ssl.VerifyMode = ssl.CERT_NONE) -> ssl.SSLContext:
    """clients: whether they are asked for a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_certificate().configure_cert(context)
    authority("ours").configure_trust(context)
    context.verify_mode = clients
    return context


def client_context(*, own: trustme.LeafCert | None = None, trusts: str = "ours") -> ssl.SSLContext:
    """own: a certificate to show. trusts: the authority that the server's is to be from."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority(trusts).configure_trust(context)
    if own is not None:
        own.configure_cert(context)
    return context


class Files:
    """Paths: cacert; cert and key of a client, and both in one; server, with its key; other, of another authority."""

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
