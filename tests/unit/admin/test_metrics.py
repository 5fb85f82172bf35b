"""The metrics: their format for Prometheus, and names that follow its conventions."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

from counterd.admin import metrics
from counterd.cluster.lease_policy import LeasePolicy
from counterd.protocols import find_protocols
from kit.shared_store import SharedStore
from unit.admin.serving import PROTOCOL, STATS

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.4"
BATCHES = {"bounds": [1.024e-06, 0.5], "counts": [5, 2, 1], "sum": 4.5}
KEYS = [figure.key for figure in metrics.LISTENER_FIGURES]


def of_protocol(number: int, keys: list[str]) -> dict[str, Any]:
    return {
        "addresses": ["127.0.0.1:1"],
        "figures": {key: place + number for place, key in enumerate(keys)},
        "outcomes": [["acquire", "ok", number], ["acquire", "not_available", 0], ["get", 'a"b\\c', 7]],
        "histograms": {"batch_seconds": BATCHES, "batch_bytes": {**BATCHES, "bounds": [16, 32]}},
    }


def stats(**protocols: Any) -> dict[str, Any]:
    return {**STATS, "protocols": protocols}


def samples(
    asked: dict[str, Any], accept: str = "", rows: metrics.Rows | None = None
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    encoder, content_type = metrics.negotiate(accept)
    body = metrics.encode(asked, [PROTOCOL], rows or {}, encoder)
    parse = openmetrics if "openmetrics" in content_type else text
    found = [sample for family in parse(body.decode()) for sample in family.samples]
    by_name = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(by_name) == len(found), "a sample is there twice"
    return by_name


def value(found: dict[Any, float], name: str, /, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_every_figure_is_a_metric(accept: str) -> None:
    found = samples(stats(fake=of_protocol(100, [*KEYS, "things", "made"])), accept)
    assert value(found, "counterd_uptime_seconds") == 5.5
    assert (value(found, "counterd_ready"), value(found, "counterd_draining")) == (1, 0)
    assert value(found, "counterd_log_lines_lost_total") == 3
    assert value(found, "counterd_internal_errors_total") == 4
    assert value(found, "counterd_memory_errors_total") == 5
    assert value(found, "counterd_admin_restarts_total") == 2
    assert value(found, "process_cpu_seconds_total") == 1.5
    assert value(found, "process_resident_memory_bytes") == 1 << 20
    assert value(found, "process_open_fds") == 9
    assert value(found, "process_max_fds") == 99
    assert value(found, "process_start_time_seconds") == 1e9
    assert value(found, "counterd_requests_total", protocol="fake", operation="acquire", status="ok") == 100
    assert value(found, "counterd_requests_total", protocol="fake", operation="get", status='a"b\\c') == 7
    for place, figure in enumerate(metrics.LISTENER_FIGURES):
        assert value(found, f"counterd_{figure.name}", protocol="fake", **figure.labels) == 100 + place
    assert value(found, "counterd_things", protocol="fake", state="new") == 100 + len(KEYS)
    assert value(found, "counterd_things_made_total", protocol="fake") == 101 + len(KEYS)


def test_every_figure_of_a_lease_policy_is_a_metric() -> None:
    policy = LeasePolicy(SharedStore(lambda _: None), lambda: "s", 10_000)
    keys = [figure.key for figure in metrics.CLUSTER_FIGURES]
    assert {f"cluster_{name}" for name in policy.figures(0)} <= set(keys)
    found = samples(stats(fake=of_protocol(100, [*KEYS, "things", "made", *keys])))
    for place, figure in enumerate(metrics.CLUSTER_FIGURES):
        labels = {"protocol": "fake", **figure.labels}
        assert value(found, f"counterd_{figure.name}", **labels) == 102 + len(KEYS) + place


def test_rows_of_a_table_have_the_name_as_label() -> None:
    rows = {"things": [{"name": "a%2Fb", "size": 3}, {"name": "a%5C%FF", "size": 4}]}
    found = samples(stats(fake=of_protocol(0, [*KEYS, "things", "made"])), rows=rows)
    assert value(found, "counterd_thing_size", protocol="fake", name="a/b") == 3
    assert value(found, "counterd_thing_size", protocol="fake", name=r"a\\xff") == 4


def test_buckets_of_a_histogram_are_cumulative() -> None:
    found = samples(stats(fake=of_protocol(0, [*KEYS, "things", "made"])))
    buckets = [
        value(found, "counterd_batch_seconds_bucket", protocol="fake", le=le) for le in ("1.024e-06", "0.5", "+Inf")
    ]
    assert buckets == [5, 7, 8]
    assert value(found, "counterd_batch_seconds_count", protocol="fake") == 8
    assert value(found, "counterd_batch_seconds_sum", protocol="fake") == 4.5
    assert value(found, "counterd_batch_bytes_bucket", protocol="fake", le="16.0") == 5
    assert value(found, "counterd_event_loop_lag_seconds_bucket", le="+Inf") == 8


def test_without_protocols_the_daemons_own_metrics_exist() -> None:
    found = samples({**stats(), "state": "draining"})
    assert (value(found, "counterd_ready"), value(found, "counterd_draining")) == (0, 1)
    assert not [name for name, _ in found if "connections" in name]


def test_build_information() -> None:
    ((labels, one),) = [(dict(labels), it) for (name, labels), it in samples(stats()).items() if name.endswith("_info")]
    assert labels["version"] == "1.2.3"
    assert re.fullmatch(r"3\.\d+\.\d+\S*", labels["python"])
    assert re.fullmatch(r"0\.\d+\.\d+", labels["uvloop"])
    assert one == 1


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/html, x", "text/plain; version=0.0.4"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text;version=nonsense", "text/plain; version=0.0.4"),
        ("text/plain;version=;;;=,,", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_negotiated(accept: str, expected: str) -> None:
    encoder, content_type = metrics.negotiate(accept)
    body = metrics.encode(stats(), [], {}, encoder)
    assert content_type.startswith(expected)
    assert body.endswith(b"# EOF\n") == ("openmetrics" in expected)


def test_the_names_of_all_protocols_follow_the_conventions() -> None:
    specs = find_protocols()
    keys = {spec.name: [*KEYS, *(key for one in spec.figures for key in (one.key, one.over) if key)] for spec in specs}
    asked = stats(**{name: of_protocol(1, of) for name, of in keys.items()})
    families = list(text(metrics.encode(asked, specs, {}, metrics.negotiate("")[0]).decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"(counterd|process)(_[a-z]+)+", family.name)
        assert family.documentation.endswith(".") or family.documentation.endswith("always 1.")
        assert family.type in ("counter", "gauge", "histogram")
        if family.samples:  # of a table there are none here
            assert (family.type == "counter") == any(sample.name.endswith("_total") for sample in family.samples)
        assert not re.search(r"_(ms|kb|mb|percent|milliseconds|minutes|total)$", family.name)
