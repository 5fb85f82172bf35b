"""Daemons that share limits through real Redis servers: one limit, whatever daemons and servers do."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis

from counterd.cluster.lease_protocol import PARTITIONS, keys, partition_of
from counterd.errors import ConnectionLost, NotAvailable
from kit import certificates, cluster
from kit.daemon import wait_until
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from counterd.client import Client
    from kit.cluster import Servers
    from kit.daemon import Daemon

pytestmark = pytest.mark.needs("redis-server")

NAME = "db:main"
MAXIMUM = 10
LEASE_S = 2  # a busy machine renews it in time
FAILOVER_LEASE_S = 5  # a server that does not answer is given up after a second, and another one found
LONG_S = 3600  # no test lasts so long
KINDS: dict[str, Callable[[Path], AbstractContextManager[Servers]]] = {
    "single": cluster.single,
    "replicated": cluster.replicated,
    "cluster": cluster.cluster,
    "scripts": lambda directory: cluster.single(directory, *cluster.SCRIPTS),
    "replicated-scripts": lambda directory: cluster.replicated(directory, *cluster.SCRIPTS),
}


@pytest.fixture(params=["single"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """Servers of the kind that a test names with `on`."""
    directory = tmp_path / "servers"
    directory.mkdir()
    with KINDS[request.param](directory) as found:
        yield found


def on(*kinds: str) -> Any:
    return pytest.mark.parametrize("servers", kinds, indirect=True)


@pytest.fixture
def share(start: Callable[..., Daemon], servers: Servers) -> Callable[..., Daemon]:
    """Starts a daemon that shares all limits, with servers that do not have to recover."""

    def share(lease: int = LEASE_S, **options: Any) -> Daemon:
        settings = {f"cluster.{key}": value for key, value in options.items()}
        daemon = start({"cluster.url": servers.url, "cluster.lease": lease, **settings})
        wait_until(lambda: servers.recover() >= PARTITIONS, "the daemon has called each partition")
        return daemon

    return share


def acquired(client: Client, name: str = NAME, amount: int = 1, maximum: int = MAXIMUM) -> bool:
    """Returns whether permits were available."""
    try:
        client.acquire(name, amount, maximum=maximum)
    except NotAvailable:
        return False
    return True


def is_lost(client: Client) -> bool:
    try:
        client.get(NAME)
    except ConnectionLost:
        return True
    return False


def figures(daemon: Daemon) -> str:
    """Returns the figures that it logs."""
    return daemon.logged_stats(["counter"])["counter"]


def acquire_all(client: Client, amount: int = MAXIMUM) -> None:
    wait_until(lambda: acquired(client, amount=amount), f"{amount} permits are available")


@on(*KINDS)
def test_two_daemons_have_one_limit(share: Callable[..., Daemon], servers: Servers) -> None:
    with share().client() as one, share().client() as other:
        acquire_all(one, 6)
        acquire_all(other, 4)
        assert not acquired(one)
        assert not acquired(other)
        one.release(NAME, 3)
        acquire_all(other, 3)
        assert not acquired(one)


@on("single", "scripts")
def test_a_server_that_loses_the_function_gets_it_again(share: Callable[..., Daemon], servers: Servers) -> None:
    """Or the script, and no client loses permits."""
    with share().client() as one, share().client() as other:
        acquire_all(one, 6)
        client = servers.masters[0].client
        client.script_flush()
        with contextlib.suppress(redis.ResponseError):
            client.function_flush()
        acquire_all(other, 4)
        assert not acquired(one)
        one.release(NAME, 6)
        acquire_all(other, 6)


@on("single", "cluster")
def test_the_sum_of_permits_never_exceeds_the_maximum(share: Callable[..., Daemon], servers: Servers) -> None:
    """Each of many threads takes permits at either daemon, and counts what all have while it has them."""
    daemons = [share(), share()]
    lock, most, rounds = threading.Lock(), 0, 40
    held = dict.fromkeys(("a", "b", "c"), 0)

    def work(daemon: Daemon, amount: int) -> None:
        nonlocal most
        with daemon.client() as client:
            for number in range(rounds):
                name = "abc"[number % 3]
                with client.hold(name, amount, maximum=MAXIMUM):
                    with lock:
                        held[name] += amount
                        most = max(most, held[name])
                    time.sleep(0.0005)  # others have to be refused
                    with lock:
                        held[name] -= amount

    threads = [threading.Thread(target=work, args=(daemons[number % 2], 1 + number % 4)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held == dict.fromkeys(held, 0), "all have come to their end"
    assert MAXIMUM - 3 <= most <= MAXIMUM


def test_a_waiter_at_one_daemon_gets_permits_released_at_the_other(share: Callable[..., Daemon]) -> None:
    first, second = share(), share()
    with first.client() as one, second.client() as other:
        acquire_all(one)

        def release() -> None:
            second.wait_for_stats(waiters=1)
            one.release(NAME, MAXIMUM)

        thread = threading.Thread(target=release)
        thread.start()
        with other.hold(NAME, MAXIMUM, maximum=MAXIMUM):
            assert not acquired(one)
        thread.join()


def test_permits_of_a_killed_daemon_come_back_after_its_lease(share: Callable[..., Daemon]) -> None:
    one, other = share(), share()
    with one.client() as client, other.client() as survivor:
        acquire_all(client)
        one.kill()
        killed = time.monotonic()
        acquire_all(survivor)
        assert time.monotonic() - killed > LEASE_S / 3, "another daemon cannot know that it is dead"


def test_a_stopping_daemon_gives_everything_back_at_once(share: Callable[..., Daemon]) -> None:
    """Its lease would last for longer than the test."""
    one, other = share(lease=LONG_S), share(lease=LONG_S)
    with one.client() as client, other.client() as survivor:
        acquire_all(client)
        one.stop()
        acquire_all(survivor)


@pytest.mark.parametrize("on_loss", ["drop", "keep"])
def test_a_daemon_suspended_for_longer_than_its_lease(share: Callable[..., Daemon], on_loss: str) -> None:
    """Others get its permits. With `drop`, its own clients notice."""
    one, other = share(on_loss=on_loss), share(on_loss=on_loss)
    with one.client() as client, other.client() as survivor:
        acquire_all(client)
        one.send_signal(signal.SIGSTOP)
        acquire_all(survivor)
        one.send_signal(signal.SIGCONT)
        if on_loss == "keep":
            assert not acquired(client)
            client.release(NAME, MAXIMUM)
        else:
            wait_until(lambda: is_lost(client), "its clients are dropped")
            one.wait_for_log("disconnected a peer that held shared permits, as others may have them by now")
            assert one.stats()["slow_readers"] == 0
        survivor.release(NAME, MAXIMUM)
    with one.client() as client:
        acquire_all(client)


@on("replicated")
def test_a_master_that_was_a_replica_for_a_moment(share: Callable[..., Daemon], servers: Servers) -> None:
    """The other master lacked the last writes, and no daemon has called it."""
    daemons = [share(lease=FAILOVER_LEASE_S), share(lease=FAILOVER_LEASE_S)]
    with daemons[0].client() as one, daemons[1].client() as other:
        servers.synchronize()
        servers.replicas[0].client.replicaof("NO", "ONE")
        acquire_all(one)
        for daemon in daemons:
            daemon.send_signal(signal.SIGSTOP)
        servers.replace_for_a_moment()
        daemons[1].send_signal(signal.SIGCONT)
        assert not acquired(other)
        daemons[0].send_signal(signal.SIGCONT)
        totals, master = keys(partition_of(NAME.encode()), "")[2], servers.masters[0].client
        wait_until(lambda: master.hexists(totals, NAME), "the master is told what the daemon has")
        servers.recover()
        assert not acquired(other)
        assert one.get(NAME) == MAXIMUM


@on("replicated", "cluster", "replicated-scripts")
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_failover_loses_nothing_that_was_replicated(
    share: Callable[..., Daemon], servers: Servers, fault: str
) -> None:
    one, other = share(lease=FAILOVER_LEASE_S), share(lease=FAILOVER_LEASE_S)
    index = servers.index_of(NAME.encode())
    with one.client() as first, other.client() as second:
        acquire_all(first, 6)
        servers.synchronize()
        getattr(servers.masters[index], fault)()
        servers.promote(index)
        acquire_all(second, 4)
        if fault == "stop":
            servers.replicas[index].go_on()
        assert not acquired(first)
        assert not acquired(second)
        first.release(NAME, 6)
        acquire_all(second, 6)


@pytest.mark.parametrize(("unreachable", "granted"), [("closed", 0), ("share", MAXIMUM // 2), ("open", MAXIMUM)])
def test_permits_granted_while_the_servers_are_unreachable(
    share: Callable[..., Daemon], servers: Servers, unreachable: str, granted: int
) -> None:
    one, other = share(unreachable=unreachable), share(unreachable=unreachable)
    for each in (one, other):
        wait_until(lambda each=each: "cluster_sidecars=2" in figures(each), "it knows the other one")  # type: ignore[misc]
    servers.masters[0].kill()
    for each in (one, other):
        line = each.wait_for_log("cannot reach the cluster, for 16 of 16 partitions")
        assert line.endswith("protocol=counter cause=cluster")
        assert f"(cluster.unreachable = {unreachable})" in line
    with one.client() as client:
        for _ in range(granted):
            acquire_all(client, 1)
        assert not acquired(client)
    servers.masters[0].start()
    for each in (one, other):
        each.wait_for_log("the cluster is reachable", 2)
    with one.client() as client, other.client() as another:
        acquire_all(client, 6)
        acquire_all(another, 4)
        assert not acquired(client)


def test_the_policy_can_change_while_the_daemon_runs(share: Callable[..., Daemon], servers: Servers) -> None:
    daemon = share()
    servers.masters[0].kill()
    daemon.wait_for_log("cannot reach the cluster")
    with daemon.client() as client:
        assert not acquired(client)
        settings = {"cluster.url": servers.url, "cluster.lease": LEASE_S, "cluster.unreachable": "open"}
        daemon.reload(settings)
        acquire_all(client)
        daemon.reload({**settings, "cluster.lease": LONG_S})
        daemon.wait_for_log(r"cluster\.lease needs a restart to change")


def test_only_names_with_the_prefix_are_shared(share: Callable[..., Daemon]) -> None:
    with share(prefix="p").client() as one, share(prefix="p").client() as other:
        for client in (one, other):
            acquire_all(client)
        wait_until(lambda: acquired(one, "p:1", 1, 1), "permits that are shared")
        assert not acquired(other, "p:1", 1, 1)


@contextlib.contextmanager
def guarded(directory: Path, files: certificates.Files) -> Iterator[tuple[Servers, dict[str, Any]]]:
    """Runs a server that serves only clients with TLS and a password. Returns also the settings that it demands."""
    (tls_port,) = free_ports(1)
    options = ("--tls-port", str(tls_port), "--tls-auth-clients", "no", "--tls-ca-cert-file", files.cacert)
    with cluster.single(
        directory, *options, "--tls-cert-file", files.server, "--tls-key-file", files.server
    ) as servers:
        set_password(servers, "open sesame")
        (directory / "credentials").write_text("counterd:open sesame\n")
        yield (
            servers,
            {
                "cluster.url": f"rediss://localhost:{tls_port}",
                "cluster.ca_file": files.cacert,
                "cluster.credentials": directory / "credentials",
                "cluster.lease": LEASE_S,
            },
        )


def set_password(servers: Servers, password: str) -> None:
    """Changes the password of the daemons' user. Existing connections are not affected."""
    servers.masters[0].client.acl_setuser(
        "counterd",
        enabled=True,
        reset_passwords=True,
        passwords=[f"+{password}"],
        keys=["counterd:*"],
        commands=["+@all"],
    )


def test_servers_with_a_password_and_tls(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """They refuse a client without. The password is nowhere in the log."""
    with guarded(tmp_path, certificates.Files(tmp_path)) as (servers, settings):
        daemon = start(settings)
        daemon.wait_for_log("the cluster is reachable")
        assert servers.masters[0].client.client_list()[-1]["user"] == "counterd"
        (tmp_path / "credentials").write_text("counterd:wrong sesame\n")
        wrong = start(settings)
        wrong.wait_for_log("cannot reach the cluster.*WRONGPASS")
    assert not [line for each in (daemon, wrong) for line in each.log if "sesame" in line]


def test_servers_with_an_untrusted_certificate(start: Callable[..., Daemon], tmp_path: Path) -> None:
    files = certificates.Files(tmp_path)
    with guarded(tmp_path, files) as (_, settings):
        daemon = start({**settings, "cluster.ca_file": files.other})
        daemon.wait_for_log("cannot reach the cluster.* certificate verify failed")
        daemon.reload(settings)
        daemon.wait_for_log("the cluster is reachable")


def test_a_password_that_changes_while_the_daemon_runs(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """Clients keep their permits if the file is changed and read again within the lease."""
    with guarded(tmp_path, certificates.Files(tmp_path)) as (servers, settings):
        daemon = start({**settings, "cluster.lease": LONG_S})
        with daemon.client() as client:
            wait_until(lambda: servers.recover() >= PARTITIONS, "the daemon has called each partition")
            acquire_all(client)
            set_password(servers, "open barley")
            (tmp_path / "credentials").write_text("counterd:open barley\n")
            daemon.reload({**settings, "cluster.lease": LONG_S})
            daemon.wait_for_log("reloaded .*the file of cluster.credentials")
            server = servers.masters[0].client
            server.client_kill_filter(user="counterd")
            wait_until(lambda: any(each["user"] == "counterd" for each in server.client_list()), "it connects again")
            client.release(NAME, MAXIMUM)
            acquire_all(client)


def test_a_refused_password_is_read_again_from_the_file(start: Callable[..., Daemon], tmp_path: Path) -> None:
    with guarded(tmp_path, certificates.Files(tmp_path)) as (servers, settings):
        daemon = start(settings)
        daemon.wait_for_log("the cluster is reachable")
        set_password(servers, "open barley")
        servers.masters[0].client.client_kill_filter(user="counterd")
        daemon.wait_for_log("cannot reach the cluster.*WRONGPASS")
        (tmp_path / "credentials").write_text("no colon\n")
        daemon.reload(settings)
        daemon.wait_for_log("not reloaded.*expected one line, USER:PASSWORD")
        (tmp_path / "credentials").write_text("counterd:open barley\n")
        daemon.reload(settings)
        daemon.wait_for_log("the cluster is reachable", 2)
    assert not [line for line in daemon.log if "open" in line and ("sesame" in line or "barley" in line)]
