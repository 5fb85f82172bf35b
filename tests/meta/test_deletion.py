"""Deleting any one protocol leaves a working tree: its modules import, the daemon serves the others, tests pass.

Nothing is built again. The installed package is copied beside the sources and the tests. All files that belong to
the protocol are removed from the copy: docs/ADDING_A_PROTOCOL.md lists them. An environment whose Python finds
the copy first runs the rest."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import site
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

import counterd
from counterd import client, protocols
from kit import daemon
from kit.machine import PATIENCE

ROOT = Path(__file__).parents[2]
INSTALLED = Path(counterd.__file__).parent

# The protocol whose client tests use to see that a daemon serves. Without it they, and their fixtures, are not there.
ASKED = "counter"
# What belongs to a protocol without being named after it: users import it by that name.
ALSO = {"counter": {"client/aio.py"}}

TESTS_OF_ALL = (
    "tests/unit/bench/dialects",
    "tests/unit/client/test_addresses.py",
    "tests/unit/client/test_calls.py",
    "tests/unit/client/test_waiting.py",
)
LOADED = {"counter", "throttr", "beanstalk"}  # which need no rules for a load
# Tests of what reads what protocols register.
TESTS = (
    "tests/meta/test_facts.py",
    "tests/unit/admin/test_metrics.py",
    "tests/unit/cli/ctl/test_ctl.py",
    "tests/unit/control/config",
    "tests/unit/protocols/test_protocols.py",
)
SECTION = re.compile(r"^# ---- .*?(?=^# ---- |\Z)", re.MULTILINE | re.DOTALL)


def is_of(protocol: str, path: Path) -> bool:
    """Whether a file or folder, or a parent of it, is named after a protocol."""
    return any(protocol in re.split(r"[_.]", part) for part in path.parts)


def module_name(path: Path) -> str:
    return ".".join((*path.parent.parts, path.name.partition(".")[0])).removesuffix(".__init__")


@functools.cache  # as each tree has the same files
def imports(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{each.name}" for each in node.names]
    return found


def without_section(text: str, protocol: str) -> str:
    """The configuration without the section of a protocol."""
    title = f"# ---- The {protocol} protocol\n"
    assert title in text
    return SECTION.sub(lambda found: "" if found[0].startswith(title) else found[0], text)


class Tree:
    """A copy of the project, from which a protocol can be deleted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "src" / "counterd"
        self.tests = folder / "tests"
        ignored = shutil.ignore_patterns("__pycache__", "*.c")
        shutil.copytree(ROOT / "src" / "counterd", self.package, ignore=ignored)
        shutil.copytree(INSTALLED, self.package, ignore=ignored, dirs_exist_ok=True)
        shutil.copytree(ROOT / "tests", self.tests, ignore=ignored)
        shutil.copytree(ROOT / "conf", folder / "conf", symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", folder)
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
        paths = sysconfig.get_paths(vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")})
        Path(paths["purelib"], "tree.pth").write_text("\n".join((str(self.package.parent), *places)))

    def delete(self, protocol: str) -> None:
        """Removes everything that belongs to a protocol."""
        gone = set()
        for folder, prefix in ((self.package, "counterd."), (self.tests, "")):
            for path in self._files(folder):
                relative = path.relative_to(folder)
                if is_of(protocol, relative) or relative.as_posix() in ALSO.get(protocol, ()):
                    gone.add(prefix + module_name(relative))
                    path.unlink()
        later: dict[str, tuple[str, str]] = vars(client)["_LATER"]  # what the package takes from its modules
        gone |= {f"counterd.client.{name}" for name, (module, _) in later.items() if module in gone}
        while found := [path for path in self._files(self.tests) if path.suffix == ".py" and needs(path, gone)]:
            for path in found:
                gone.add(module_name(path.relative_to(self.tests)))
                path.unlink()
        for folder in [path for path in self.folder.rglob("*") if is_of(protocol, path.relative_to(self.folder))]:
            shutil.rmtree(folder, ignore_errors=True)
        config = self.package / "counterd.conf"
        config.write_text(without_section(config.read_text("utf-8"), protocol), "utf-8")

    def _files(self, folder: Path) -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file()]

    def modules(self) -> list[str]:
        sources = (
            path.relative_to(self.package) for pattern in ("*.py", "*.pyx") for path in self.package.rglob(pattern)
        )
        names = {f"counterd.{module_name(path)}".removesuffix(".__init__") for path in sources}
        return sorted(name for name in names if not name.endswith("__main__"))

    def run(self, *arguments: Any) -> str:
        """Returns the output of the copy's Python, which must succeed."""
        env = {key: value for key, value in daemon.environment().items() if not key.startswith(("PYTEST_", "COV"))}
        done = subprocess.run(
            [self.python, *map(str, arguments)], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


def needs(path: Path, gone: set[str]) -> bool:
    """Whether a file imports a module that was deleted, or something of it."""
    return any(f"{name}.".startswith(f"{each}.") for name in imports(path.read_text("utf-8")) for each in gone)


@pytest.fixture(params=protocols.names())
def deleted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Tree]:
    """A protocol, and the tree without it."""
    tree = Tree(tmp_path / "tree")
    tree.delete(request.param)
    return request.param, tree


def test_the_rest_works_without_the_protocol(deleted: tuple[str, Tree], short_path: Path) -> None:
    protocol, tree = deleted
    left = [name for name in protocols.names() if name != protocol]
    assert tree.run("-c", "from counterd import protocols; print(*protocols.names())").split() == left
    tree.run("-c", "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]", *tree.modules())

    settings = {f"{name}.port": 0 for name in left} | {f"{name}.enable": "true" for name in left}
    settings |= {"admin.enable": "true", "admin.bind": f"unix:{short_path}/admin", "smockron.control_port": 0}
    known = {key: value for key, value in settings.items() if not key.startswith(f"{protocol}.")}
    arguments = [word for key, value in known.items() for word in ("--set", f"{key}={value}")]
    config = (tree.package / "counterd.conf").read_text("utf-8")
    with daemon.running(short_path, text=config, arguments=arguments, program=(tree.python, "-m", "counterd")) as it:
        it.wait_for_log("admin listens on")
        assert {name for name in protocols.names() if it.lines(rf"\b{name} listens on")} == {*left}
        ctl = ("-c", "from counterd.cli.ctl import main; main()")
        offered = re.findall(r"^  (\w+) ", tree.run(*ctl, "--help"), re.MULTILINE)
        assert {"ping", "connections", *left} - {"counter"} <= {*offered} - {protocol} == {*offered}
        for name in LOADED & {*left}:
            port = it.address_of(name).port
            assert "200 answered" in tree.run("-m", "counterd.cli.bench", "--protocol", name, "-p", port, "-n", 200)
        tree.run(*ctl, "--timeout", f"{PATIENCE:g}s", "connections", "--admin", f"unix:{short_path}/admin")

    tests = TESTS_OF_ALL if protocol == ASKED else TESTS_OF_ALL + TESTS
    assert all((tree.folder / name).exists() for name in tests)
    tree.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests)


def test_which_files_belong_to_a_protocol() -> None:
    for name in (
        "protocols/throttr/wire.py",
        "client/throttr/_keys.py",
        "test_throttr_model.py",
        "fuzz/corpus/throttr.txt",
    ):
        assert is_of("throttr", Path(name))
    for name in ("protocols/counter/wire.py", "test_start.py", "throttrs.py"):
        assert not is_of("throttr", Path(name))
    for name in ("counterd.conf", "cli/ctl/data.py", "test_counterctl.py", "test_counters.py"):
        assert not is_of("counter", Path(name))
    text = "a = 1\n# ---- The one protocol\none.b = 1\n# ---- The two protocol\ntwo.c = 1\n"
    assert without_section(text, "one") == "a = 1\n# ---- The two protocol\ntwo.c = 1\n"
    assert without_section(text, "two") == "a = 1\n# ---- The one protocol\none.b = 1\n"


def test_which_sources_need_the_deleted_protocol(tmp_path: Path) -> None:
    for text, found in (
        ("from counterd.protocols.one import wire", True),
        ("def f():\n    import counterd.protocols.one.wire", True),
        ("from counterd.protocols import one", True),
        ("from counterd.protocols import ones", False),
        ("import counterd.protocols", False),
    ):
        (tmp_path / "test.py").write_text(text)
        assert needs(tmp_path / "test.py", {"counterd.protocols.one"}) == found
    assert module_name(Path("protocols/one/__init__.py")) == "protocols.one"
    assert module_name(Path("net/stream.cpython-311-x86_64-linux-gnu.so")) == "net.stream"
