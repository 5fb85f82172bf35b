"""TLS files of a running daemon: replaced without losing connections, and refused together if one of them is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from counterd.protocols.counter import wire
from kit import daemon, peers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Scene:
    """A daemon with TLS whose files a test can change. settings: the daemon's; files: by name, of one authority."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = trustme.CA()
        self.issue()
        self.authority.cert_pem.write_to_path(self.path("ca"))
        self.settings = {"counter.tls.cert": self.path("cert"), "counter.tls.key": self.path("key")}
        self.counterd: daemon.Daemon

    def path(self, name: str) -> str:
        return str(self.directory / f"{name}.pem")

    def issue(self) -> None:
        """Issues a new certificate and key."""
        issued = self.authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
        issued.cert_chain_pems[0].write_to_path(self.path("cert"))
        issued.private_key_pem.write_to_path(self.path("key"))

    @contextlib.contextmanager
    def connected(self, certificate: trustme.LeafCert | None = None) -> Iterator[ssl.SSLSocket]:
        context = ssl.create_default_context(cafile=self.path("ca"))
        if certificate is not None:
            certificate.configure_cert(context)
        with (
            socket.create_connection(self.counterd.address, daemon.PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            yield connection

    def serial(self) -> str:
        """Returns the serial number of the certificate that a new connection gets."""
        with self.connected() as connection:
            return str(connection.getpeercert()["serialNumber"])

    def not_reloaded(self) -> str:
        """Makes the daemon reload its files, and returns the error that it logs."""
        count = len(self.counterd.lines("not reloaded"))
        self.counterd.send_signal(signal.SIGHUP)
        return self.counterd.wait_for_log("not reloaded", count + 1).partition("not reloaded: ")[2]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("tls"))
    with daemon.running(scene.directory / "daemon", scene.settings) as scene.counterd:
        yield scene


@pytest.fixture
def scene(running: Scene) -> Iterator[Scene]:
    """The daemon, with correct files before each test."""
    running.issue()
    running.counterd.reload(running.settings)
    return running


def test_certificates_change_under_live_connections(scene: Scene) -> None:
    with scene.connected() as old:
        assert peers.ask(old, wire.acquire(1, b"jobs", 2, 2)).status == 0
        before = scene.serial()
        scene.issue()
        assert scene.serial() == before, "files are read when they are to be, not when they change"
        scene.counterd.reload(scene.settings)
        assert scene.counterd.lines(r"reloaded .*: the TLS files of counter$")
        assert scene.serial() != before
        assert peers.ask(old, wire.get(2, b"jobs")).body == (2).to_bytes(4, "big")


def test_a_key_of_another_certificate_is_refused(scene: Scene) -> None:
    before = scene.serial()
    scene.authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(scene.path("key"))
    scene.counterd.config.write_text(daemon.config_text(scene.settings | {"counter.max_connections": 7}))
    assert scene.not_reloaded() == (
        f"{scene.counterd.config}:5: counter.tls.key: the private key in {scene.path('key')} does not belong to the"
        f" certificate in {scene.path('cert')}"
    )
    assert scene.serial() == before
    scene.issue()
    scene.counterd.reload(scene.settings)
    assert scene.serial() != before
    assert not scene.counterd.lines("max_connections")


@pytest.mark.parametrize("spoil", ["missing", "empty"])
def test_a_missing_or_empty_certificate_is_refused(scene: Scene, spoil: str) -> None:
    before = scene.serial()
    if spoil == "missing":
        Path(scene.path("cert")).unlink()
    else:
        os.truncate(scene.path("cert"), 0)
    why = "{} cannot be read" if spoil == "missing" else "no certificate in PEM in {}"
    assert why.format(scene.path("cert")) in scene.not_reloaded()
    assert scene.serial() == before


def test_a_reload_can_require_client_certificates(scene: Scene) -> None:
    mine = scene.authority.issue_cert("client@example.org")
    needed = scene.settings | {"counter.tls.client_ca": scene.path("ca"), "counter.tls.require_client_cert": "true"}
    with scene.connected() as old:
        scene.counterd.reload(needed)
        assert peers.ask(old, wire.noop(1)).status == 0, "it was let in, and stays"
        with scene.connected(mine) as shown:
            assert peers.ask(shown, wire.noop(1)).status == 0
        with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)), scene.connected() as nobody:
            peers.ask(nobody, wire.noop(1))


def test_the_log_says_which_side_refused_which_certificate(scene: Scene) -> None:
    needed = scene.settings | {"counter.tls.client_ca": scene.path("ca"), "counter.tls.require_client_cert": "true"}
    scene.counterd.reload(needed)
    stranger = trustme.CA().issue_cert("client@example.org")
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)), scene.connected(stranger) as connection:
        peers.ask(connection, wire.noop(1))
    scene.counterd.wait_for_log("failed: CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate")
    trusts_none = ssl.create_default_context(cafile=scene.path("cert"))
    with (
        socket.create_connection(scene.counterd.address, daemon.PATIENCE) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        trusts_none.wrap_socket(plain, server_hostname="another.example.org")
    scene.counterd.wait_for_log("failed: the client refused it: .*ALERT_")


def test_tls_can_be_turned_off_and_on(scene: Scene) -> None:
    with scene.connected() as old:
        scene.counterd.reload({})
        with scene.counterd.connect() as plain:
            assert peers.ask(plain, wire.noop(1)).status == 0
            scene.counterd.reload(scene.settings)
            assert scene.serial()
            assert peers.ask(plain, wire.noop(2)).status == 0
        assert peers.ask(old, wire.noop(1)).status == 0


def test_check_reads_the_tls_files(scene: Scene, tmp_path: Path) -> None:
    config = tmp_path / "x.conf"
    config.write_text(daemon.config_text({"counter.tls.cert": scene.path("ca")}))
    result = daemon.run("-c", config, "--check")
    assert result.returncode == 2
    wanted = f"{config}:4: counter.tls.cert: no private key in PEM in {scene.path('ca')}"
    assert result.stderr.startswith(wanted)
