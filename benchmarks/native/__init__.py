"""Builds the benchmarks' own extensions against the installed counterd, once per change, and imports them."""

from __future__ import annotations

import fcntl
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from counterd import _core

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
# With the assertions of the counterd that it is built against, and not among what was built against another.
BUILD = HERE.parents[1] / "build" / "benchmarks" / f"{sys.implementation.cache_tag}{'-debug' * _core.DEBUG}"
COMPILE_ARGS = ["-O1", "-g", "-DCOUNTERD_DEBUG=1"] if _core.DEBUG else ["-O3"]


def build(name: str, folder: Path = HERE) -> Path:
    """The extension made of that .pyx. Processes wait for each other: none reads what another is writing."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(name, folder)


def _build(name: str, folder: Path) -> Path:
    """Needs Cython, setuptools and a C compiler: the extra `dev`."""
    from Cython.Build import cythonize
    from setuptools import Extension
    from setuptools.dist import Distribution

    extensions = cythonize(
        [Extension(name, [str(folder / f"{name}.pyx")], extra_compile_args=COMPILE_ARGS)],
        build_dir=str(BUILD / "c"),
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
        },
        quiet=True,
    )
    command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib = str(BUILD)
    command.build_temp = str(BUILD / "temp")
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(name))


def load(name: str, built: Path | None = None) -> ModuleType:
    """The compiled module, from where it was built if that is known: then nothing is needed but itself."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, built or build(name))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def load_native() -> ModuleType:
    """Variants of the engine, load, and what takes part in measuring."""
    return load("_native")


def load_reference() -> ModuleType:
    """What the engine's time is held against: it has nothing of counterd."""
    return load("_reference")
