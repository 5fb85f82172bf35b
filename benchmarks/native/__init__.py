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
# With assertions if the installed counterd has them. Each kind of build has its own directory.
BUILD = HERE.parents[1] / "build" / "benchmarks" / f"{sys.implementation.cache_tag}{'-debug' * _core.DEBUG}"
COMPILE_ARGS = ["-O1", "-g", "-DCOUNTERD_DEBUG=1"] if _core.DEBUG else ["-O3"]


def build(name: str, folder: Path = HERE) -> Path:
    """Compiles a .pyx file and returns the extension's path. A lock keeps processes from building at the same time."""
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
    """Returns the compiled module. built: the path of a finished extension, which then is not built here."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, built or build(name))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def load_native() -> ModuleType:
    """Returns the module with variants of the engine, the load generator and helpers for measuring."""
    return load("_native")


def load_reference() -> ModuleType:
    """Returns the kernel that the engine's time is compared with. It contains no code of counterd."""
    return load("_reference")
