"""The extension modules and the build mode; everything else is in pyproject.toml.

COUNTERD_BUILD=release (default)  what people run
COUNTERD_BUILD=debug              assertions compiled in, frame pointers kept: fit for sanitizers
COUNTERD_BUILD=quick              assertions too, built in the least time: to see that it works with another Python
COUNTERD_BUILD=trace              line tracing compiled in: for coverage of the Cython files
"""

import os
import sys
import zlib
from pathlib import Path

from Cython import __version__ as cython_version
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODE = os.environ.get("COUNTERD_BUILD", "release")
COMPILE_ARGS = {
    "release": ["-O3", "-g1", "-fno-plt"],
    "debug": ["-Og", "-g1", "-fno-omit-frame-pointer", "-DCOUNTERD_DEBUG=1"],
    "quick": ["-O0", "-g0", "-DCOUNTERD_DEBUG=1"],
    "trace": ["-O1", "-g", "-DCYTHON_TRACE_NOGIL=1", "-DCYTHON_USE_SYS_MONITORING=0"],
}
if MODE not in COMPILE_ARGS:
    raise SystemExit(f"COUNTERD_BUILD={MODE}: expected one of {', '.join(COMPILE_ARGS)}")

# One tree of objects per mode and CFLAGS: a debug build never reuses a release object, a sanitized one neither.
CFLAGS = os.environ.get("CFLAGS", "")
BUILD = f"build/{MODE}-{zlib.crc32(CFLAGS.encode()):08x}" if CFLAGS else f"build/{MODE}"

SOURCES = sorted(Path("src").rglob("*.pyx"))
if not SOURCES:
    raise SystemExit("no .pyx file below src: this is not the whole source tree")

# The daemon's C uses epoll and what else only Linux has: it would not compile elsewhere.
if not sys.platform.startswith("linux"):
    raise SystemExit(
        f"counterd is for Linux, and cannot be built on {sys.platform}: run it in a container. The Python"
        " client needs no compiler: set PYTHONPATH to the folder src of this source tree"
    )

# What Cython adds to every module, compiled once. Its C is generated, see BuildExtensions.
UTILITY = "counterd._utility"

JOBS = len(os.sched_getaffinity(0))


class BuildExtensions(build_ext):
    """Makes the C only where something is compiled: neither for a source distribution nor for the metadata."""

    def run(self) -> None:
        made = cythonize(
            list(self.extensions),
            nthreads=JOBS,
            # One C for all modes and Pythons; but trace has more in it, beside its source, for coverage's plugin.
            build_dir=None if MODE == "trace" else f"build/cython-{cython_version}",
            include_path=["src"],
            shared_utility_qualified_name=UTILITY,
            compiler_directives={
                "language_level": 3,
                "boundscheck": False,
                "wraparound": False,
                "initializedcheck": False,
                "cdivision": True,
                "embedsignature": True,
                "auto_pickle": False,
                "linetrace": MODE == "trace",
            },
        )
        sources = {extension.name: extension.sources for extension in made}
        for extension in self.extensions:  # setuptools has prepared these, and would miss that in others
            extension.sources = sources[extension.name]
        super().run()


setup(
    cmdclass={"build_ext": BuildExtensions},
    options={"build": {"build_base": BUILD}, "build_ext": {"parallel": JOBS}},
    ext_modules=[
        Extension(name, [source], extra_compile_args=[*COMPILE_ARGS[MODE], "-Wno-unused-function"])
        for name, source in [
            *((".".join(path.relative_to("src").with_suffix("").parts), str(path)) for path in SOURCES),
            (UTILITY, f"src/{UTILITY.replace('.', '/')}.c"),
        ]
    ],
)
