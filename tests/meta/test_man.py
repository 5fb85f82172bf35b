"""The pages in man/ describe the program as it is, and formatters accept them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from counterd.cli import daemon
from counterd.control.config.keys import LISTENER, settings_for, shared_settings
from counterd.protocols import find_protocols
from kit import needs

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "man").iterdir())


@pytest.fixture(scope="module")
def man() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man", ROOT / "tools" / "man.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(page: str) -> str:
    return (ROOT / "man" / page).read_text("utf-8")


@pytest.mark.parametrize("page", ["counterbench.1", "counterctl.1", "counterd.conf.5"])
def test_generated_parts_of_a_page_are_up_to_date(man: ModuleType, page: str) -> None:
    assert set(man.PARTS) == {"counterbench.1", "counterctl.1", "counterd.conf.5"}
    assert man.renewed(page, text(page)) == text(page), "`make docs` writes it anew"


def test_an_option_is_left_out_only_where_the_group_has_the_same(man: ModuleType) -> None:
    """`beanstalk put --key` is the key of a job, and `beanstalk --key` that of a certificate."""
    shared = click.Option(["--output"], help="The format.")
    command = click.Command("put", params=[shared, click.Option(["--key"], help="The job's key.")])
    group = click.Group("queue", [command], params=[shared, click.Option(["--key"], help="The private key.")])
    lines = list(man.commands(group, "queue"))
    assert lines[lines.index(".Ss put") :] == [
        ".Ss put", ".Dl put [OPTIONS]", ".Bl -tag -width Ds", '.It Fl Fl key Ar "TEXT"', "The job's key.", ".El",
    ]  # fmt: skip


def test_a_page_without_marks_is_an_error(man: ModuleType) -> None:
    with pytest.raises(ValueError, match="has no lines"):
        man.renewed("counterctl.1", ".Sh NAME\n")


def test_every_setting_is_in_the_page() -> None:
    items = re.findall(r"^\.It Ic (\S+) =", text("counterd.conf.5"), re.MULTILINE)
    specs, shared = find_protocols(), shared_settings()
    of_each = {f"{spec.name}{key.removeprefix(LISTENER)}" for key in shared for spec in specs}
    assert sorted(items) == sorted((settings_for(specs).keys() | shared.keys()) - of_each)


def test_every_option_of_the_daemon_is_in_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        daemon.parse(["--help"])
    options = set(re.findall(r"(?<![\w-])--?[a-z]+", capsys.readouterr().out))
    assert {"-c", "--config", "--check"} <= options
    items = re.findall(r"^\.It Fl (.*)$", text("counterd.1"), re.MULTILINE)
    said = {
        f"-{flag}".replace("-Fl ", "--") for item in items for flag in re.findall(r"(?:^|, Fl )((?:Fl )?\w+)", item)
    }
    assert said == options


@pytest.mark.needs("mandoc")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_formatters_accept_the_pages(page: Path) -> None:
    done = subprocess.run([needs.path("mandoc"), "-Tlint", page], capture_output=True, text=True, check=False)
    # Whether the other pages are installed is no fault of this one.
    assert [line for line in done.stdout.splitlines() if "referenced manual not found" not in line] == []


def test_words_of_the_mdoc_language_are_escaped(man: ModuleType) -> None:
    assert man.guarded(man.escaped(r".a \b `c`")) == r"\&.a \eb \(gac\(ga"
    assert man.quoted('say "a"') == r'"say \(dqa\(dq"'
    assert man.sentences(["One thing.  Another", "one, e.g. this."]) == ["One thing.", "Another one, e.g. this."]
