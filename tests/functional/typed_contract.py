"""The server's stores, sessions, connections and plugins satisfy its contract. mypy checks this file; it is never
run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.protocols import counter, sentinel, throttr

if TYPE_CHECKING:
    from counterd import contract
    from counterd._core import Session, Store
    from counterd.extensions.host import Plugin, PluginHost
    from counterd.net.connection import Connection


def satisfy(store: Store, session: Session, connection: Connection, host: PluginHost, plugin: Plugin) -> None:
    _store: contract.Store = store
    _session: contract.Session = session
    _peer: contract.Peer = connection
    _host: contract.PluginHost = host
    _plugin: contract.Plugin = plugin


def register() -> None:
    _counter: contract.WindowedStore = counter.make_store(counter.CounterSettings(), dict, 0)
    _throttr: contract.Store = throttr.make_store(throttr.ThrottrSettings(), dict, 0)
    _sentinel: contract.Store = sentinel.make_store(sentinel.SentinelSettings(), dict, 0)


def misuse(session: Session, store: contract.Store, peer: contract.Peer) -> None:
    store.audit()  # type: ignore[attr-defined]
    store.begin_window(1)  # type: ignore[attr-defined]
    peer.pull()  # type: ignore[attr-defined]
    session.owner.abort()  # type: ignore[union-attr]
    _windowed: contract.WindowedStore = store  # type: ignore[assignment]
