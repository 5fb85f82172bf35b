"""counterctl cluster, with real servers and daemons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Permit, Rate
from counterd.cluster.lease_protocol import PARTITIONS
from functional.test_cluster import FAILOVER_LEASE_S, LEASE_S, MAXIMUM, NAME, acquire_all, acquired, is_lost
from functional.test_counterctl import ctl
from kit import cluster
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.cluster import Servers
    from kit.daemon import Daemon

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many-machines.md"

pytestmark = pytest.mark.needs("redis-server")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with cluster.cluster(tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture
def share(start: Callable[..., Daemon], servers: Servers) -> Callable[[], Daemon]:
    def share() -> Daemon:
        daemon = start({"cluster.url": servers.url, "cluster.lease": FAILOVER_LEASE_S})
        wait_until(lambda: servers.recover() >= PARTITIONS, "the daemon has called each partition")
        return daemon

    return share


def listed(daemon: Daemon, *arguments: str) -> Any:
    done = ctl(1, "--output", "json", "cluster", "-c", str(daemon.config), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_daemons_and_their_rights_are_listed(share: Callable[[], Daemon]) -> None:
    one, other = share(), share()
    with one.client() as first, other.client() as second:
        acquire_all(first, 6)
        acquire_all(second, 4)
        rows = listed(one, NAME)
        assert rows[0] == {
            "daemon": None,
            "rights": MAXIMUM,
            "used": MAXIMUM,
            "mode": None,
            "waits_for": 0,
            "full_seconds": None,
        }
        assert sorted(row["used"] for row in rows[1:]) == [4, 6]
        of_pid = {int(row["daemon"].rsplit("-", 2)[1]): row for row in listed(one)}
        assert (of_pid[one.pid]["used"], of_pid[other.pid]["used"]) == (6, 4)
        assert all(0 < row["lease_seconds"] <= FAILOVER_LEASE_S for row in of_pid.values())
        table = ctl(1, "cluster", "--servers", "redis://" + one.config.read_text().split("redis://")[1].split("\n")[0])
        assert table.returncode == 0
        assert table.stdout.split()[:6] == ["daemon", "lease", "partitions", "counters", "rights", "used"]


def test_the_units_of_a_rate_are_listed(share: Callable[[], Daemon]) -> None:
    """A tenth of it was used, and comes back after a tenth of its period."""
    daemon = share()
    items = Permit("units", maximum=1), Rate("units", 10, limit=100, per=3600)
    with daemon.client() as client, client.take(*items, timeout=PATIENCE):  # nothing is granted before a first answer
        (everything, _) = listed(daemon, "units")
        assert 300 < everything["full_seconds"] <= 360
    wait_until(lambda: len(listed(daemon, "units")) == 1, "nobody has permits of that name")


def test_the_redis_user_of_the_guide_has_all_permissions(
    start: Callable[..., Daemon], servers: Servers, tmp_path: Path
) -> None:
    (rule,) = re.findall(r"^ACL SETUSER .*?(?=^```)", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    for each in servers.all:
        each.client.execute_command(*rule.split())
    (tmp_path / "redis").write_text("counterd:SECRET\n")
    settings = {"cluster.url": servers.url, "cluster.credentials": tmp_path / "redis", "cluster.lease": LEASE_S}
    one, other = start(settings), start(settings)
    wait_until(lambda: servers.recover() >= PARTITIONS, "the daemons have called each partition")
    with one.client() as first, other.client() as second:
        acquire_all(first)
        assert not acquired(second)
        with second.take(Rate("others", 10, limit=10, per=3600)):
            pass
        (daemon,) = [row["daemon"] for row in listed(one, NAME) if row["daemon"]]
        assert daemon in {row["daemon"] for row in listed(one)}
        assert ctl(1, "cluster", "-c", str(one.config), "--evict", daemon).returncode == 0
        wait_until(lambda: acquired(second, amount=MAXIMUM), "others get its permits")
    assert not [line for each in (one, other) for line in each.lines("NOPERM")]


def test_a_daemon_that_is_evicted_loses_its_permits(share: Callable[[], Daemon]) -> None:
    one, other = share(), share()
    with one.client() as first, other.client() as second:
        acquire_all(first)
        (daemon,) = [row["daemon"] for row in listed(one, NAME) if row["daemon"]]
        done = ctl(1, "cluster", "-c", str(one.config), "--evict", daemon)
        assert done.returncode == 0
        assert done.stderr.startswith(f"counterctl: ended the leases of {daemon} in ")
        wait_until(lambda: is_lost(first), "its clients are dropped")
        wait_until(lambda: acquired(second, amount=MAXIMUM), "others get its permits")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("nothing",), 1, "no daemon has rights to nothing"),
        (("--evict", "nobody"), 1, "no daemon nobody has a lease"),
        (("--evict", "nobody", "name"), 2, "give either NAME or --evict"),
        (("--servers", "nowhere"), 2, "--servers: expected redis://HOST:PORT"),
        (("--servers", "redis://127.0.0.1:1"), 3, "cannot reach the servers of the cluster: 127.0.0.1:1: "),
    ],
)
def test_unknown_names_and_unreachable_servers(
    share: Callable[[], Daemon], arguments: tuple[str, ...], status: int, says: str
) -> None:
    done = ctl(1, "--timeout", "2s", "cluster", "-c", str(share().config), *arguments)
    assert done.returncode == status
    assert says in done.stderr


def test_an_unshared_name_is_an_error(tmp_path: Path, servers: Servers) -> None:
    (tmp_path / "F").write_text(f"counter.enable = true\ncluster.url = {servers.url}\ncluster.prefix = shared:\n")
    done = ctl(1, "cluster", "-c", str(tmp_path / "F"), NAME)
    assert done.returncode == 1
    assert "db:main is not shared: it does not begin with cluster.prefix, shared:" in done.stderr


def test_a_configuration_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "F").write_text("counter.enable = true\n")
    done = ctl(1, "cluster", "-c", str(tmp_path / "F"))
    assert done.returncode == 2
    assert "has no cluster.url; name another file with -c, or --servers URL" in done.stderr
