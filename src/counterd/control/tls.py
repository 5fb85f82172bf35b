"""TLS for a room: a context made of the files that the configuration names, checked before anybody uses it.

Floor 4. A context is never changed: who has begun with one keeps it, and new files make a new one.
"""

from __future__ import annotations

import ssl

from counterd.control.files import FileError, read_file

FILE_MAX = 1 << 20  # bytes: some thousand certificates, which the loop waits for at a reload


class TLSError(Exception):
    """A file that cannot be used. name: the last part of its key, "cert" and so on; as text: why."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(why)


def make_context(cert: str, key: str = "", client_ca: str = "", require_client_cert: bool = False) -> ssl.SSLContext:
    """A context of a server, for TLS 1.2 and newer. Raises TLSError.

    cert: path of the certificate and those above it, in PEM. key: path of its private key, or "" if that is in cert.
    client_ca: path of the authorities that clients' certificates are checked with, or "" to ask for none.
    require_client_cert: whether a client without one is refused.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _check_certificates("cert", cert)
    key_name = "key" if key else "cert"
    if key:
        _read(key_name, key)
    try:
        context.load_cert_chain(cert, key or None, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TLSError(
                key_name, f"the private key in {key or cert} is not that of the certificate in {cert}"
            ) from None
        raise TLSError(key_name, f"there is no private key in PEM in {key or cert}{_reason(error)}") from None
    except ValueError as error:
        raise TLSError(key_name, f"the private key in {key or cert} {error}") from None
    except OSError as error:  # it was there a moment ago
        raise TLSError(key_name, f"{cert} and {key or cert} cannot be read: {error.strerror}") from None
    if client_ca:
        context.load_verify_locations(cadata=_check_certificates("client_ca", client_ca))
        context.verify_mode = ssl.CERT_REQUIRED if require_client_cert else ssl.CERT_OPTIONAL
    return context


def _read(name: str, path: str) -> bytes:
    try:
        return read_file(path, FILE_MAX)
    except FileError as error:
        raise TLSError(name, str(error)) from None


def _check_certificates(name: str, path: str) -> str:
    """The text of a file. OpenSSL does not say which of its files it means: this one is looked at alone."""
    text = _read(name, path).decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise TLSError(name, f"there is no certificate in PEM in {path}{_reason(error)}") from None
    return text


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f": {reason.replace('_', ' ').lower()}" if reason else ""


def _no_passphrase() -> str:
    """OpenSSL would ask for it at the terminal."""
    raise ValueError("has a passphrase, and nobody is there to give it")
