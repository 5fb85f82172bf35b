"""One table lists what the tests need of the machine: all of it is needed, and only this table names packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit import needs

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest
from kit import needs

@pytest.mark.needs("spin")
@pytest.mark.parametrize("number", range(3))
def test_that_needs_it(number):
    assert needs.path("spin") == "{spin}"

@pytest.mark.needs("spin", "ipv6", partly=True)
def test_that_does_less_without():
    pass

def test_that_does_not_say_so():
    with pytest.raises(AssertionError, match="a test uses spin without"):
        needs.path("spin")
"""


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a suite that needs spin, with the folder `bin` as the path; returns pytest's output."""
    suite = tmp_path / "suite"
    suite.mkdir()
    folder = tmp_path / "bin"
    folder.mkdir()
    (suite / "test_it.py").write_text(SUITE.replace("{spin}", str(folder / "spin")))
    config = tmp_path / "pytest.ini"
    config.write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\naddopts = --strict-markers\n")

    def run(*arguments: str, ci: str = "") -> list[str]:
        command = [sys.executable, "-m", "pytest", "-c", config, "--confcutdir", suite, "-p", "conftest", *arguments]
        environment = {**os.environ, "PATH": str(folder), "PYTHONPATH": str(ROOT / "tests"), "CI": ci}
        done = subprocess.run([*command, suite], capture_output=True, text=True, env=environment, check=False)
        return (done.stdout + done.stderr).splitlines()

    return run


MISSING = "  spin                4 tests  apt-get install spin  (visits every state of the formal model)"
REASON = "no spin: apt-get install spin"


@pytest.mark.parametrize("processes", [["-n0"], ["-n2"]], ids=["one process", "two"])
def test_missing_needs_are_listed_and_their_tests_skipped(play: Callable[..., list[str]], processes: list[str]) -> None:
    said = play(*processes, "-rs")
    assert said.count(MISSING) == 1
    assert "tests that need it are skipped" in said[said.index(MISSING) - 1]
    assert "make test-deps" in said[said.index(MISSING) + 1]
    assert [line for line in said if line.startswith("SKIPPED [3]") and line.endswith(REASON)]
    assert re.search("2 passed, 3 skipped", said[-1])


def test_in_ci_tests_with_missing_needs_fail(play: Callable[..., list[str]]) -> None:
    said = play("-n0", ci="true")
    assert "tests that need it fail" in said[said.index(MISSING) - 1]
    assert said.count(REASON) == 4
    assert re.search("1 passed, 4 errors", said[-1])


def test_nothing_is_listed_if_nothing_is_missing(play: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "bin" / "spin").symlink_to("/bin/true")
    said = play("-n0", ci="true")
    assert "5 passed" in said[-1]
    assert "missing" not in "\n".join(said)


def test_the_table_has_exactly_the_needs_of_the_tests() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    marks = re.findall(r"mark\.needs\(([^)]*)\)", "\n".join(sources))
    assert {name for mark in marks for name in re.findall(r'"([\w-]+)"', mark)} == set(needs.TABLE)


def test_only_the_table_checks_programs_and_names_packages() -> None:
    others = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("needs.py", Path(__file__).name)]
    others += [ROOT / "Makefile", ROOT / ".ci" / "run"]
    packages = "|".join(sorted({need.package for need in needs.TABLE.values() if need.package}))
    found = re.compile(rf"shutil\.which\(|skipif\(os\.gete|apt-get install.* (?:{packages})\b")
    assert [path for path in others if found.search(path.read_text("utf-8"))] == []


def test_each_need_has_a_remedy() -> None:
    for name, need in needs.TABLE.items():
        assert bool(need.package) != bool(need.remedy), name
        assert bool(need.is_there) == bool(need.remedy), name


# ---- installing ------------------------------------------------------------------------------------------------------


def command(tmp_path: Path, *arguments: str, **programs: str) -> tuple[int, str, list[str]]:
    """Runs the module where only these scripts are installed: its status, stderr, and the scripts' arguments."""
    folder, told = tmp_path / "bin", tmp_path / "told"
    folder.mkdir(exist_ok=True)
    for name, script in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(
            f'#!/bin/sh\necho "$(basename "$0") $*" >>{told}\n{script}\n'.replace("$(basename", "$(/bin/basename")
        )
        path.chmod(0o755)
    code = (
        "import os, sys\nsys.path.insert(0, sys.argv.pop(1))\nfrom kit import needs\nneeds.find = needs.shutil.which\n"
        "os.geteuid = lambda: int(os.environ['AS'])\nsys.exit(needs.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "tests", *arguments],
        env={"PATH": str(folder), "AS": os.environ.get("AS", "0")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, told.read_text().splitlines() if told.exists() else []


KNOWN = 'case "$2" in chromium) echo "  Candidate: (none)";; *) echo "  Candidate: 1";; esac'


def test_only_existing_packages_are_installed(tmp_path: Path) -> None:
    programs = [name for name, need in needs.TABLE.items() if need.package and name != "chromium"]
    brings = "".join(f'/bin/ln -sf /bin/true "$(/usr/bin/dirname "$0")/{name}"\n' for name in programs)
    status, said, told = command(
        tmp_path, "--install", apt_get=f'case "$1" in install) {brings};; esac', apt_cache=KNOWN
    )
    wanted = sorted({needs.TABLE[name].package for name in programs})
    assert told[0] == "apt-get update -qq"
    assert told[-1] == f"apt-get install -y -qq --no-install-recommends {' '.join(wanted)}"
    assert (status, said) == (
        1,
        "test-deps: no chromium (the dashboard is tested in it): no package chromium brings it\n",
    )


def test_without_root_the_command_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AS", "1000")
    status, said, told = command(tmp_path, "--install", apt_get="")
    assert (status, told) == (1, [])
    assert said.startswith(
        "test-deps: only root can install them: sudo apt-get install beanstalkd caddy chromium faketime "
    )


def test_without_apt_the_packages_are_printed(tmp_path: Path) -> None:
    status, said, _ = command(tmp_path, "--install")
    assert (status, said.split("; ")[0]) == (1, "test-deps: no apt-get here")


def test_nothing_to_install(tmp_path: Path) -> None:
    everything = {name.replace("-", "_"): "" for name, need in needs.TABLE.items() if need.package}
    assert command(tmp_path, "--install", **everything) == (0, "", [])
