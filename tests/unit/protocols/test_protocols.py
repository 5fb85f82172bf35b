"""What the protocols register fits their stores and the abilities that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols import find_protocols
from counterd.settings import settings_of

if TYPE_CHECKING:
    from counterd.contract import ProtocolSpec

PROTOCOLS = find_protocols()


def store_of(spec: ProtocolSpec) -> Any:
    return spec.make_store(spec.settings(), dict, 0)


@pytest.mark.parametrize("spec", PROTOCOLS, ids=lambda spec: spec.name)
def test_figures_are_in_the_snapshot_and_have_names_of_metrics(spec: ProtocolSpec) -> None:
    snapshot = store_of(spec).snapshot()
    assert spec.figures
    assert len({(figure.name, *figure.labels.items()) for figure in spec.figures}) == len(spec.figures)
    for figure in spec.figures:
        assert {figure.key, figure.over or figure.key} <= snapshot.keys()
        assert isinstance(figure.value(snapshot), (int, float))
        assert re.fullmatch(r"[a-z_]+", figure.name)
        assert figure.name.endswith("_total") == (figure.kind == "counter")
        assert figure.help.endswith(".")
        alike = [other for other in spec.figures if other.name == figure.name]
        assert {(other.kind, other.help, *other.labels) for other in alike} == {
            (figure.kind, figure.help, *figure.labels)
        }


@pytest.mark.parametrize("spec", PROTOCOLS, ids=lambda spec: spec.name)
def test_tables_open_with_every_sort_and_refuse_unknown_parameters(spec: ProtocolSpec) -> None:
    store = store_of(spec)
    required = {name: {"connection": "1"} for name in ("holdings", "waits", "subscriptions", "reserved")}
    required |= {name: {"name": "a"} for name in ("holders", "queue", "limit")}
    assert spec.tables()
    for table in spec.tables():
        assert re.fullmatch(r"[a-z]+", table.name)
        given = required.get(table.name, {})
        for parameters in ({}, *({"sort": sort} for sort in table.sorts)):
            walk = table.open(store, given | parameters)
            while not walk.step():
                pass
            assert len(walk.rows()) == walk.total == (table.name == "tubes")  # of which one is always there
        for wrong in ({"sort": "wrong"}, {"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"other": "1"}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
                table.open(store, given | wrong)
        if given:
            with pytest.raises(ValueError, match=f"the parameter {next(iter(given))} is missing"):
                table.open(store, {})


@pytest.mark.parametrize("spec", PROTOCOLS, ids=lambda spec: spec.name)
def test_files_and_extensions_are_named_by_settings_of_the_protocol(spec: ProtocolSpec) -> None:
    settings = {setting.key: setting for setting in settings_of(spec.settings, f"{spec.name}.")}
    files = spec.files.readers if spec.files else {}
    methods = spec.extensions.methods if spec.extensions else {}
    for key in (*files, *methods):
        assert settings[key].default == ""
    assert all(settings[key].reload for key in files)
    assert not any(settings[key].reload for key in methods)


@pytest.mark.parametrize("spec", PROTOCOLS, ids=lambda spec: spec.name)
def test_a_protocol_with_windows_has_a_store_that_begins_them(spec: ProtocolSpec) -> None:
    assert hasattr(store_of(spec), "begin_window") == (spec.windows is not None)
    if spec.windows is not None:
        assert spec.windows.key in {setting.key for setting in settings_of(spec.settings, f"{spec.name}.")}


def test_tables_have_names_of_their_own() -> None:
    found = [table.name for spec in PROTOCOLS for table in spec.tables()]
    assert len(found) == len({*found}) > 0


def test_registering_a_protocol_imports_no_compiled_module() -> None:
    code = "import sys, counterd.protocols as p; p.find_protocols(); sys.exit('counterd._core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
