"""TLS contexts of servers, and the errors for files that cannot be used."""

from __future__ import annotations

import os
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest
import trustme

from counterd.control import tls
from counterd.control.tls import TLSError, make_context
from kit import needs

if TYPE_CHECKING:
    from pathlib import Path


class Files:
    """Files in a directory: a certificate and its key, apart and together, another key, an authority, and one that is
    no PEM file.
    """

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
        self.directory = directory
        self.write("cert", issued.cert_chain_pems[0].bytes())
        self.write("key", issued.private_key_pem.bytes())
        self.write("both", issued.private_key_and_cert_chain_pem.bytes())
        self.write("other", authority.issue_cert("127.0.0.1").private_key_pem.bytes())
        self.write("ca", authority.cert_pem.bytes())
        os.mkfifo(self.fifo)
        self.write("long", b"\n" * (tls.FILE_MAX + 1))
        self.write("text", b"not a \xff certificate\n")
        self.write("broken", issued.cert_chain_pems[0].bytes().replace(b"MII", b"???", 1))

    def write(self, name: str, content: bytes) -> None:
        (self.directory / name).write_bytes(content)

    def __getattr__(self, name: str) -> str:
        return str(self.directory / name)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def test_a_context_of_a_server(files):
    context = make_context(files.cert, files.key)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE
    assert make_context(files.both).get_ca_certs() == []


def test_certificates_of_clients(files):
    asks = make_context(files.cert, files.key, files.ca)
    needs = make_context(files.cert, files.key, files.ca, True)
    assert (asks.verify_mode, needs.verify_mode) == (ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)
    assert len(needs.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("given", "name", "why"),
    [
        (("none", "key", ""), "cert", "{none} cannot be read: No such file or directory"),
        (("cert", "none", ""), "key", "{none} cannot be read: No such file or directory"),
        (("cert", "key", "none"), "client_ca", "{none} cannot be read: No such file or directory"),
        (("fifo", "key", ""), "cert", "{fifo} is not a regular file"),
        (("cert", "fifo", ""), "key", "{fifo} is not a regular file"),
        (("cert", "key", "fifo"), "client_ca", "{fifo} is not a regular file"),
        (("long", "key", ""), "cert", "{long} has more than 1048576 bytes"),
        (("", "", ""), "cert", "{directory} cannot be read: Is a directory"),
        (("text", "key", ""), "cert", "no certificate in PEM in {text}"),
        (("broken", "key", ""), "cert", "no certificate in PEM in {broken}"),
        (("key", "key", ""), "cert", "no certificate in PEM in {key}"),
        (("cert", "text", ""), "key", "no private key in PEM in {text}"),
        (("cert", "cert", ""), "key", "no private key in PEM in {cert}"),
        (("cert", "", ""), "cert", "no private key in PEM in {cert}"),
        (("cert", "other", ""), "key", "the private key in {other} does not belong to the certificate in {cert}"),
        (("cert", "key", "text"), "client_ca", "no certificate in PEM in {text}"),
        (("cert", "key", "key"), "client_ca", "no certificate in PEM in {key}"),
    ],
)
def test_unusable_files_are_errors(files, given, name, why):
    cert, key, client_ca = given
    paths = {word: getattr(files, word) for word in ("none", "fifo", "long", "text", "broken", "key", "cert", "other")}
    with pytest.raises(TLSError) as caught:
        make_context(getattr(files, cert), key and getattr(files, key), client_ca and getattr(files, client_ca))
    assert caught.value.name == name
    assert str(caught.value).startswith(why.format(directory=getattr(files, ""), **paths))


def test_a_key_that_is_removed_while_it_is_read(files, monkeypatch):
    read = tls._read
    monkeypatch.setattr(tls, "_read", lambda name, path: read(name, path) if name == "cert" else b"")
    with pytest.raises(TLSError, match="cannot be read: No such file or directory"):
        make_context(files.cert, files.none)


@pytest.mark.needs("openssl")
def test_a_key_with_a_passphrase_is_refused(files):
    openssl = needs.path("openssl")
    encrypt = [openssl, "pkey", "-in", files.key, "-out", files.locked, "-aes256", "-passout", "pass:x"]
    subprocess.run(encrypt, check=True)
    with pytest.raises(TLSError, match="locked has a passphrase, which counterd cannot ask for") as caught:
        make_context(files.cert, files.locked)
    assert caught.value.name == "key"
