"""Makes TLS contexts from the files that the configuration names, and checks the files.

Floor 4 (ARCHITECTURE.md). The daemon never changes a TLS context. A reload makes a new context; existing connections
keep the old context.
"""

from __future__ import annotations

import ssl

from counterd.control.files import FileError, read_file

FILE_MAX = 1 << 20  # bytes, about a thousand certificates: limits how long a reload takes


class TLSError(Exception):
    """A TLS file cannot be used.

    name: the last part of the file's setting, such as "cert". str() returns the reason.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(why)


def make_context(cert: str, key: str = "", client_ca: str = "", require_client_cert: bool = False) -> ssl.SSLContext:
    """Makes the TLS context of a server, for TLS 1.2 and newer. Raises TLSError.

    cert: the path of the certificate and its chain, in PEM. key: the path of the private key, or "" if the key is in
    cert.
    client_ca: the path of the authorities for clients' certificates, or "" if clients are not asked for a certificate.
    require_client_cert: whether clients without a certificate are refused.
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
                key_name, f"the private key in {key or cert} does not belong to the certificate in {cert}"
            ) from None
        raise TLSError(key_name, f"no private key in PEM in {key or cert}{_reason(error)}") from None
    except ValueError as error:
        raise TLSError(key_name, f"the private key in {key or cert} {error}") from None
    except OSError as error:  # the file has vanished since it was read
        raise TLSError(key_name, f"{cert} and {key or cert} cannot be read: {error.strerror}") from None
    if client_ca:
        context.load_verify_locations(cadata=_check_certificates("client_ca", client_ca))
        context.verify_mode = ssl.CERT_REQUIRED if require_client_cert else ssl.CERT_OPTIONAL
    return context


def make_client_context(ca_file: str) -> ssl.SSLContext:
    """Makes the TLS context of a client, for TLS 1.2 and newer. Raises TLSError.

    ca_file: the path of the authorities for servers' certificates, in PEM, or "" for those of the system.
    """
    return ssl.create_default_context(cadata=_check_certificates("ca_file", ca_file) if ca_file else None)


def _read(name: str, path: str) -> bytes:
    try:
        return read_file(path, FILE_MAX)
    except FileError as error:
        raise TLSError(name, str(error)) from None


def _check_certificates(name: str, path: str) -> str:
    """Reads and checks one file of certificates.

    Without this check, OpenSSL's errors would not say which of several files is wrong.
    """
    text = _read(name, path).decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise TLSError(name, f"no certificate in PEM in {path}{_reason(error)}") from None
    return text


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f": {reason.replace('_', ' ').lower()}" if reason else ""


def _no_passphrase() -> str:
    """Refuses a key that has a passphrase.

    Without this function, OpenSSL would ask for the passphrase at the terminal.
    """
    raise ValueError("has a passphrase, which counterd cannot ask for")
