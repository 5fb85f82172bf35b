"""All installed modules can be imported, and the whole source tree is installed."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import counterd

INSTALLED = Path(counterd.__file__).parent
SOURCES = Path(__file__).parents[2] / "src" / "counterd"
MODULES = [
    module.name
    for module in pkgutil.walk_packages(counterd.__path__, "counterd.")
    if not module.name.endswith(".__main__")  # running is all that importing it does
]
COMPILED_INTO = ".so"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_imported(module: str) -> None:
    importlib.import_module(module)


def names(folder: Path) -> set[str]:
    """Returns the files of a package, with a compiled module for each one that is to be compiled."""
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_dir() or path.suffix in {".pyc", ".c"}:
            continue
        if path.suffix in (".pyx", ".so"):
            name = name.with_name(name.name.partition(".")[0] + COMPILED_INTO)
        found.add(name.as_posix())
    return found


def test_the_package_has_exactly_the_source_tree() -> None:
    assert names(INSTALLED) == names(SOURCES) | {"_utility.so"}  # its source is Cython's
