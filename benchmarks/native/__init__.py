"""Builds the benchmarks' own extension against the installed counterd, once per change, and imports it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "benchmarks" / sys.implementation.cache_tag


@functools.cache
def load_native() -> ModuleType:
    """The compiled module. Needs Cython, setuptools and a C compiler: the extra `bench`."""
    from Cython.Build import cythonize
    from setuptools import Extension
    from setuptools.dist import Distribution

    extensions = cythonize(
        [Extension("_native", [str(HERE / "_native.pyx")], extra_compile_args=["-O3"])],
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
    spec = importlib.util.spec_from_file_location("_native", command.get_ext_fullpath("_native"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
