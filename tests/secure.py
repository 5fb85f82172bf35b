"""Certificates of an authority that is made up for the tests, and servers that speak TLS with them."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import trustme

import scripted

if TYPE_CHECKING:
    from pathlib import Path

    from scripted import Peer


class Certificates:
    """Files: cacert; cert and key of a client, and both in one; server, with its key; other, of another authority."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self._server = authority.issue_cert("localhost", "127.0.0.1", "::1")
        self._authority = authority
        client = authority.issue_cert("client@example.org", common_name="client")
        self.cacert, self.cert, self.key, self.both, self.server, self.other = (
            str(directory / f"{name}.pem") for name in ("cacert", "cert", "key", "both", "server", "other")
        )
        self._server.private_key_and_cert_chain_pem.write_to_path(self.server)
        authority.cert_pem.write_to_path(self.cacert)
        client.cert_chain_pems[0].write_to_path(self.cert)
        client.private_key_pem.write_to_path(self.key)
        client.private_key_and_cert_chain_pem.write_to_path(self.both)
        trustme.CA().cert_pem.write_to_path(self.other)

    def server_context(self, *, asks: bool = False) -> ssl.SSLContext:
        """asks: for a certificate of the client, and takes nobody without."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.configure_cert(context)
        if asks:
            self._authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.cacert)


class Server(scripted.Server):
    """The scripted server, with TLS. failed: handshakes that were."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context
        self.failed: list[ssl.SSLError] = []

    def serve(self, peer: Peer) -> None:
        try:
            connection = self._context.wrap_socket(peer.socket, server_side=True)
        except ssl.SSLError as error:
            self.failed.append(error)
            raise
        with connection:
            peer.socket = connection
            super().serve(peer)
