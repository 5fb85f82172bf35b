"""Certificates for tests: one authority for all, and what a server and its clients need of it."""

from __future__ import annotations

import functools
import ssl

import trustme


@functools.cache
def authority(name: str) -> trustme.CA:
    """One of several that do not trust each other."""
    return trustme.CA(organization_name=name)


@functools.cache
def certificate(owner: str = "127.0.0.1", by: str = "ours") -> trustme.LeafCert:
    return authority(by).issue_cert(owner, common_name=owner)


def server_context(*, clients: ssl.VerifyMode = ssl.CERT_NONE) -> ssl.SSLContext:
    """clients: whether they are asked for a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate().configure_cert(context)
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
