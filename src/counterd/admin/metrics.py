"""Makes Prometheus metrics from the daemon's answer to /stats. Names and units follow Prometheus's conventions.

Floor: side (ARCHITECTURE.md), without HTTP. A protocol registers its own figures, so a new protocol needs no change in
this file. Nothing is kept between two scrapes, because the daemon does all counting.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from counterd.tables import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from counterd.contract import ProtocolSpec
    from counterd.tables import Table

    Family = CounterMetricFamily | GaugeMetricFamily
    Encoder = Callable[[CollectorRegistry], bytes]
    Rows = Mapping[str, Iterable[Mapping[str, Any]]]

PREFIX = "counterd_"

REJECTED = "Connections that were refused, by cause."
CLOSED = "Connections that the server closed, by cause."
POLICY = "1 for the policy that decides now, because a server of the cluster cannot be reached."
HANDSHAKES_FAILED = "TLS handshakes that failed, by cause."

# The figures of every protocol's listeners. The figures that a protocol registers follow them.
LISTENER_FIGURES = (
    Figure("curr_connections", "connections", "gauge", "Open connections."),
    Figure("connections_max", "connections_limit", "gauge", "Connections that can be open at the same time."),
    Figure(
        "total_connections", "connections_opened_total", "counter", "Connections that were accepted and not refused."
    ),
    *(
        Figure(f"rejected:{cause}", "connections_rejected_total", "counter", REJECTED, {"cause": cause})
        for cause in ("allow", "max_connections", "per_address", "memory", "descriptors")
    ),
    Figure("slow_readers", "connections_closed_total", "counter", CLOSED, {"cause": "slow_reader"}),
    Figure("vanished_peers", "connections_closed_total", "counter", CLOSED, {"cause": "vanished"}),
    Figure("idle_closed", "connections_closed_total", "counter", CLOSED, {"cause": "idle"}),
    Figure("killed", "connections_closed_total", "counter", CLOSED, {"cause": "killed"}),
    *(
        Figure(f"handshakes_failed:{cause}", "handshakes_failed_total", "counter", HANDSHAKES_FAILED, {"cause": cause})
        for cause in ("timeout", "protocol", "certificate")
    ),
    Figure("handshakes", "handshakes", "gauge", "TLS handshakes in progress."),
    Figure(
        "slowed",
        "connections_slowed_total",
        "counter",
        "How often a connection was slowed down because it exceeded max_requests_per_second.",
    ),
    Figure("stuck_outputs", "slow_readers", "gauge", "Connections whose client is not reading its replies."),
    Figure("bytes_in", "received_bytes_total", "counter", "Bytes read from connections."),
    Figure("bytes_out", "sent_bytes_total", "counter", "Bytes written to connections."),
)

# The figures of a protocol that shares its limits.
CLUSTER_FIGURES = (
    Figure("cluster_rights", "cluster_rights", "gauge", "Permits that this daemon may use, of shared counters."),
    Figure("cluster_stranded", "cluster_rights_stranded", "gauge", "Such permits that are not in use."),
    Figure("cluster_sidecars", "cluster_sidecars", "gauge", "Daemons that share limits, as far as this one knows."),
    Figure("cluster_leases", "cluster_leases", "gauge", "Partitions in which this daemon has a lease."),
    Figure("cluster_lease_age", "cluster_lease_age_seconds", "gauge", "Time since the oldest lease was renewed."),
    Figure("cluster_learning", "cluster_learning", "gauge", "Partitions whose new master lends nothing more yet."),
    Figure("cluster_unreachable", "cluster_unreachable", "gauge", "Partitions whose server cannot be reached."),
    *(
        Figure(f"cluster_policy:{policy}", "cluster_policy", "gauge", POLICY, {"policy": policy})
        for policy in ("closed", "share", "open")
    ),
    Figure(
        "cluster_overshoot",
        "cluster_overshoot",
        "gauge",
        "Permits beyond the maximum that all daemons use, of counters that this daemon uses.",
    ),
    Figure("cluster_overshoot_max", "cluster_overshoot_max", "gauge", "The most such permits of one counter so far."),
    Figure("cluster_calls", "cluster_calls_total", "counter", "Calls to servers of the cluster."),
    Figure("cluster_failed", "cluster_calls_failed_total", "counter", "Calls that had no answer or could not be made."),
    Figure("cluster_asked", "cluster_asked_total", "counter", "How often a server was asked for a waiting request."),
    Figure("cluster_refused", "cluster_refused_total", "counter", "How often it refused."),
    Figure(
        "cluster_refused_in_vain",
        "cluster_refused_in_vain_total",
        "counter",
        "How often it refused although permits were free at other daemons.",
    ),
    Figure("cluster_lost", "cluster_leases_lost_total", "counter", "Leases that ended while they were needed."),
    Figure("cluster_dropped", "cluster_dropped_total", "counter", "Connections that were closed because of that."),
)

PROTOCOL_HISTOGRAMS = {
    "batch_seconds": "Seconds from reading the requests of a connection to sending the replies.",
    "batch_bytes": "Bytes that each read from a connection returned.",
}


class Scrape(Collector):
    """The metrics of one answer to /stats. rows: the rows of the tables that have metrics, by the name of the table."""

    def __init__(self, stats: Mapping[str, Any], specs: Sequence[ProtocolSpec], rows: Rows) -> None:
        self._stats = stats
        self._rows = rows
        self._specs = {spec.name: spec for spec in specs}

    def collect(self) -> Iterator[Metric]:
        yield from self._of_daemon()
        yield from self._of_process()
        yield from self._of_protocols()

    def _of_daemon(self) -> Iterator[Metric]:
        stats = self._stats
        build = {"version": stats["version"], "python": platform.python_version(), "uvloop": version("uvloop")}
        # A gauge, because only one of the two formats, OpenMetrics, has a type for this.
        made_of = family(
            "build_info", "gauge", "Versions of counterd, Python and uvloop, as labels; the value is always 1.", build
        )
        made_of.add_metric(tuple(build.values()), 1)
        yield made_of
        yield gauge("uptime_seconds", "Seconds since the start of the daemon.", stats["uptime_seconds"])
        yield gauge("ready", "1 while the daemon accepts connections.", stats["state"] == "ready")
        yield gauge("draining", "1 while the daemon is draining, before it stops.", stats["state"] == "draining")
        yield counter("log_lines_lost", "Log lines that were lost.", stats["log"]["lines_lost"])
        yield counter("internal_errors", "Unexpected exceptions: bugs in counterd.", stats["internal_errors"])
        yield counter("memory_errors", "How often the daemon ran out of memory.", stats["memory_errors"])
        yield counter("admin_restarts", "How often the admin process was restarted.", stats["admin"]["restarts"])
        late = HistogramMetricFamily(
            f"{PREFIX}event_loop_lag_seconds", "How late the event loop ran its timers, in seconds."
        )
        add_histogram(late, (), stats["histograms"].get("loop_lag_seconds"))
        yield late

    def _of_process(self) -> Iterator[Metric]:
        """Yields the metrics of the daemon's process (not of the admin process), with the names that Prometheus's
        libraries use."""
        process = self._stats["process"]
        cpu = "User and system CPU time of the daemon in seconds."
        yield CounterMetricFamily("process_cpu_seconds", cpu, process["cpu_seconds"])
        for name, key, text in (
            ("process_resident_memory_bytes", "resident_bytes", "Resident memory of the daemon in bytes."),
            ("process_open_fds", "open_fds", "Open file descriptors of the daemon."),
            ("process_max_fds", "max_fds", "File descriptors that the daemon can have open."),
            ("process_start_time_seconds", "start_time_seconds", "Start time of the daemon in seconds since 1970."),
        ):
            yield GaugeMetricFamily(name, text, process[key])

    def _of_protocols(self) -> Iterator[Metric]:
        protocols = self._stats["protocols"]
        requests = CounterMetricFamily(
            f"{PREFIX}requests", "Requests by operation and status.", labels=("protocol", "operation", "status")
        )
        for protocol, stats in protocols.items():
            for operation, status, count in stats["outcomes"]:
                requests.add_metric((protocol, operation, status), count)
        yield requests
        for name, text in PROTOCOL_HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=("protocol",))
            for protocol, stats in protocols.items():
                add_histogram(histogram, (protocol,), stats["histograms"].get(name))
            yield histogram
        families: dict[str, Family] = {}
        for protocol, stats in protocols.items():
            shared = CLUSTER_FIGURES if "cluster_calls" in stats["figures"] else ()
            for figure in (*LISTENER_FIGURES, *self._specs[protocol].figures, *shared):
                add_figure(families, figure, protocol, stats["figures"])
            for table in self._specs[protocol].tables():
                add_rows(families, table, protocol, self._rows.get(table.name, ()))
        yield from families.values()


def negotiate(accept: str) -> tuple[Encoder, str]:
    """Returns the encoder for the format that an Accept header prefers, and the content type of this format."""
    try:
        return exposition.choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a version number
        return exposition.choose_encoder("")


def encode(stats: Mapping[str, Any], specs: Sequence[ProtocolSpec], rows: Rows, encoder: Encoder) -> bytes:
    """Encodes the metrics in a text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(stats, specs, rows))
    return encoder(registry)


def family(name: str, kind: str, text: str, labels: Iterable[str]) -> Family:
    """Makes a metric family without samples. The name of a counter may end in _total."""
    made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    return made(PREFIX + name, text, labels=tuple(labels))


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value)


def add_figure(families: dict[str, Family], figure: Figure, protocol: str, snapshot: Mapping[str, float]) -> None:
    """Adds a figure of a protocol to the family with the figure's name.

    A family can contain several figures and several protocols.
    """
    if figure.name not in families:
        families[figure.name] = family(figure.name, figure.kind, figure.help, ("protocol", *figure.labels))
    families[figure.name].add_metric((protocol, *figure.labels.values()), figure.value(snapshot))


def add_rows(families: dict[str, Family], table: Table, protocol: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds the metrics of a table from the rows that site.py returns, in which names are percent-encoded."""
    label = table.columns[0].name
    for figure in table.metrics:
        made = families[figure.name] = family(
            figure.name, figure.kind, figure.help, ("protocol", label, *figure.labels)
        )
        for row in rows:
            name = unquote(row[label], errors="backslashreplace")
            made.add_metric((protocol, name, *figure.labels.values()), figure.value(row))


def add_histogram(histogram: HistogramMetricFamily, labels: tuple[str, ...], counted: Mapping[str, Any] | None) -> None:
    """Adds a histogram. Converts the counts of single buckets to the cumulative counts that Prometheus needs."""
    if counted is None:
        return
    bounds = (*map(floatToGoString, counted["bounds"]), "+Inf")
    histogram.add_metric(labels, list(zip(bounds, accumulate(counted["counts"]), strict=True)), counted["sum"])
