"""Real Redis servers through which daemons share limits: one, a master with a replica, or a Redis Cluster.

They listen on loopback, or each at a host of its own (namespaces.py), keep their files in a directory of the test, and
are ended by pid. No timeout of theirs ends during a test: a test that wants a failover demands it (promote), so that
nothing depends on how busy the machine is.
"""

from __future__ import annotations

import binascii
import bisect
import contextlib
import signal
import subprocess
from typing import TYPE_CHECKING

import redis

from counterd.cluster.lease_protocol import PARTITIONS, TAGS, partition_of
from kit import needs
from kit.daemon import wait_until
from kit.machine import PATIENCE
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kit.namespaces import Host

MASTERS = 3
SLOTS = 16384
FIRSTS = [SLOTS * index // MASTERS for index in range(MASTERS)]  # the first slot of each master
# While a cluster is made, its servers talk often; then their timeout becomes longer than a test.
FORMING_TIMEOUT_MS, TIMEOUT_MS = 1000, 600_000
OPTIONS = ("--save", "", "--repl-diskless-sync-delay", "0")
# A replica counts as one when its master has sent it something, at the latest with the first ping.
PINGS = ("--repl-ping-replica-period", "1")
SCRIPTS = ("--rename-command", "FUNCTION", "")  # no Functions, as before Redis 7
CLUSTER = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(FORMING_TIMEOUT_MS))


def slot_of(partition: int) -> int:
    return binascii.crc_hqx(b"%d" % TAGS[partition], 0) % SLOTS


class Server:
    """A redis-server. host: where it runs; None: here. client: to look into it, and to tell it what to do."""

    def __init__(self, directory: Path, *options: str, host: Host | None = None) -> None:
        self.host = host
        self.address = "127.0.0.1" if host is None else host.address
        self.port, bus_port = free_ports(2)
        directory.mkdir()
        options = (*options, "--cluster-port", str(bus_port)) if "--cluster-enabled" in options else options
        self._command = [
            needs.path("redis-server"),
            "--port",
            str(self.port),
            "--bind",
            self.address,
            "--dir",
            str(directory),
            *OPTIONS,
            *PINGS,
        ]
        self._command += options
        if host is None:
            self.client = redis.Redis(port=self.port, decode_responses=True)
        else:  # a path is reached from everywhere, whatever the network loses
            path = str(directory / "socket")
            self._command = [*host.inside, *self._command, "--protected-mode", "no", "--unixsocket", path]
            self.client = redis.Redis(unix_socket_path=path, decode_responses=True)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, f"redis-server answers on port {self.port}")

    def configure(self, key: str, value: int) -> None:
        """Sets an option, also for the next starts."""
        self.client.config_set(key, value)
        self._command += [f"--{key}", str(value)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Lets it answer no more, as if the network swallowed everything."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.client.close()
        self.kill()

    def role(self) -> str:
        return self.client.role()[0]

    def id(self) -> str:
        """Returns its name in a Redis Cluster."""
        return self.client.execute_command("CLUSTER", "MYID")

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"redis-server on port {self.port} has ended"
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False


class Servers:
    """Masters, and a replica for each of them. all: in the order of their starts."""

    def __init__(self, masters: Sequence[Server], replicas: Sequence[Server]) -> None:
        self.masters = list(masters)
        self.replicas = list(replicas)
        self.all = [*masters, *replicas]

    @property
    def url(self) -> str:
        """Names all of them, for cluster.url."""
        return "redis://" + ",".join(f"{each.address}:{each.port}" for each in self.all)

    def index_of(self, name: bytes) -> int:
        """Returns which of the masters has a name, while no slot has moved."""
        return self._index(partition_of(name))

    def recover(self) -> int:
        """Lets all masters believe that daemons have reported everything. Returns how many partitions were called."""
        keys = [(master.client, key) for master in self.masters for key in master.client.scan_iter("counterd:*:meta")]
        for client, key in keys:
            client.hset(key, "learns", 0)
        return len(keys)

    def synchronize(self) -> None:
        """Waits until each replica has everything that its master has by now."""
        for index, master in enumerate(self.masters):
            partition = next(each for each in range(PARTITIONS) if self._index(each) == index)
            master.client.set(f"{{{TAGS[partition]}}}", "")  # a write on this connection, for which WAIT waits
            assert master.client.wait(1, int(PATIENCE * 1000)) == 1
            master.client.delete(f"{{{TAGS[partition]}}}")

    def promote(self, index: int) -> Server:
        """Makes the replica of a master the master, whether or not the old one still answers. Returns the new one."""
        replica = self.replicas[index]
        if len(self.masters) == 1:
            replica.client.replicaof("NO", "ONE")
        else:
            replica.client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        return self.replaced(index)

    def replaced(self, index: int) -> Server:
        """Waits until the replica of a master is the master. Returns it."""
        replica = self.replicas[index]
        wait_until(lambda: replica.role() == "master", "the replica is the master")
        self.masters[index], self.replicas[index] = replica, self.masters[index]
        return replica

    def replace_for_a_moment(self) -> None:
        """Gives the master of two servers what the other one has, and makes it the master again."""
        master, other = self.masters[0], self.replicas[0]
        master.client.replicaof("127.0.0.1", other.port)
        wait_until(lambda: _is_synchronized(master), "it has forgotten what the other one lacks")
        master.client.replicaof("NO", "ONE")

    def join(self, master: Server) -> None:
        """Adds a master without slots to a Redis Cluster."""
        _meet(self.masters[0], master)
        everybody = [*self.masters, *self.replicas, master]
        for each in everybody:
            wait_until(lambda each=each: _knows(each, len(everybody)), "all know each other")  # type: ignore[misc]
        wait_until(lambda: _is_up(master), "it accepts slots")
        self.masters.append(master)

    def owner(self, partition: int) -> Server:
        """Returns the master that has a partition now, as the masters say."""
        slot = slot_of(partition)
        ranges = self.masters[0].client.execute_command("CLUSTER", "SLOTS")
        port = next(found[2][1] for found in ranges if found[0] <= slot <= found[1])
        return next(each for each in self.masters if each.port == port)

    def move(self, partition: int, target: Server, halfway: Callable[[], object] = lambda: None) -> None:
        """Moves a partition's slot and keys to another master, as redis-cli does. halfway: called in the middle."""
        slot, source = slot_of(partition), self.owner(partition)
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id())
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id())
        count = source.client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot)
        moved = 0
        while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            if moved == count // 2:
                halfway()
            source.client.execute_command("MIGRATE", target.address, target.port, "", 0, 10_000, "KEYS", *keys)
            moved += 1
        for each in (target, source, *(other for other in self.masters if other not in {target, source})):
            each.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target.id())

    def _index(self, partition: int) -> int:
        slot = slot_of(partition)
        return bisect.bisect_right(FIRSTS, slot) - 1 if len(self.masters) > 1 else 0


@contextlib.contextmanager
def single(directory: Path, *options: str) -> Iterator[Servers]:
    """Runs one server during the block. options: added to its command line."""
    with _running(directory, 1, *options) as servers:
        yield Servers(servers, [])


@contextlib.contextmanager
def replicated(directory: Path, *options: str) -> Iterator[Servers]:
    """Runs a master and a replica during the block. options: added to their command lines."""
    with _running(directory, 2, *options) as (master, replica):
        replica.client.replicaof("127.0.0.1", master.port)
        wait_until(lambda: _is_synchronized(replica), "the replica follows")
        yield Servers([master], [replica])


@contextlib.contextmanager
def cluster(directory: Path, timeout_ms: int = TIMEOUT_MS, hosts: Sequence[Host] = ()) -> Iterator[Servers]:
    """Runs a Redis Cluster of three masters, each with a replica, during the block.

    timeout_ms: a master that has not answered for this long is replaced by its replica. hosts: one for each server;
    none: all run here.
    """
    with _running(directory, 2 * MASTERS, *CLUSTER, hosts=hosts) as servers:
        masters, replicas = servers[:MASTERS], servers[MASTERS:]
        for index, each in enumerate(masters):
            last = (*FIRSTS, SLOTS)[index + 1] - 1
            each.client.execute_command("CLUSTER", "ADDSLOTSRANGE", FIRSTS[index], last)
            each.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for each in servers[1:]:
            _meet(servers[0], each)
        for each in servers:
            wait_until(lambda each=each: _knows(each, len(servers)), "all know each other")  # type: ignore[misc]
        for master, replica in zip(masters, replicas, strict=True):
            replica.client.execute_command("CLUSTER", "REPLICATE", master.client.execute_command("CLUSTER", "MYID"))
        for replica in replicas:
            wait_until(lambda replica=replica: _is_synchronized(replica), "the replica follows")  # type: ignore[misc]
        for each in servers:
            wait_until(lambda each=each: _is_complete(each), "the cluster is complete")  # type: ignore[misc]
            each.configure("cluster-node-timeout", timeout_ms)
        yield Servers(masters, replicas)


def _meet(first: Server, other: Server) -> None:
    bus_port = other.client.config_get("cluster-port")["cluster-port"]
    first.client.execute_command("CLUSTER", "MEET", other.address, other.port, bus_port)


def _knows(server: Server, count: int) -> bool:
    nodes = server.client.execute_command("CLUSTER", "NODES").splitlines()
    return len(nodes) == count and not any("handshake" in each for each in nodes)


def _is_complete(server: Server) -> bool:
    ranges = server.client.execute_command("CLUSTER", "SLOTS")
    servers = [len(each) - 2 for each in ranges]  # after the first and the last slot
    return _is_up(server) and servers == [2] * MASTERS


def _is_up(server: Server) -> bool:
    return "cluster_state:ok" in server.client.execute_command("CLUSTER", "INFO")


def _is_synchronized(replica: Server) -> bool:
    return replica.client.info("replication").get("master_link_status") == "up"


@contextlib.contextmanager
def _running(directory: Path, count: int, *options: str, hosts: Sequence[Host] = ()) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(count):
            host = hosts[number] if hosts else None
            servers.append(Server(directory / f"redis-{number}", *options, host=host))
            stack.callback(servers[-1].close)
        yield servers
