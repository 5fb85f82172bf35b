"""The examples in README.md and the guides work exactly as written, with a real counterd."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.cli import bench
from counterd.cluster.lease_protocol import PARTITIONS
from kit import cluster, needs, pages, proxies, reference
from kit.daemon import wait_until
from kit.gates import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.daemon import Daemon

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
}
# Examples that are not run: one more needs a better reason than that it would be work.
NOT_RUN_MAX = {"python": 0, "sh": 2}
# The rules of sentinel and of smockron.
RULES, DOMAINS = (
    next(block.text for block in pages.blocks(PAGES[f"docs/guides/{name}.md"]) if block.info == "json")
    for name in ("cluster-tokens", "slow-requests-down")
)
MIGRATION = "docs/guides/from-beanstalkd.md"
BEHIND_NGINX = "docs/guides/throttle-behind-nginx.md"
OLD_PORT = 11400  # of the beanstalkd in that page
MANY_MACHINES = "docs/guides/many-machines.md"
SECOND_PORT = 11225  # of the second daemon in that page
# Without examples that could be run here, but with links.
LINKED = {
    name: (ROOT / name).read_text("utf-8")
    for name in ("SECURITY.md", "docs/cluster.md", "docs/counterbench.md", "docs/operations.md", "docs/scale.md")
}
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture
def run(start: Callable[..., Daemon], tmp_path: Path) -> Callable[..., None]:
    """Runs the examples in a text, with a server of their own behind all default ports."""

    def run_text(text: str, name: str = "page.md", others: Mapping[int, int] | None = None) -> None:
        rules = tmp_path / "rules.json"
        rules.write_text(RULES)
        domains = tmp_path / "domains.json"
        domains.write_text(DOMAINS)
        protocols = {9000: "throttr", 10004: "smockron", 11300: "beanstalk", 18730: "sentinel"}
        settings = {"sentinel.rules": rules, "smockron.rules": domains, "beanstalk.journal": tmp_path / "jobs"}
        settings["smockron.control_port"] = "0"
        for protocol in protocols.values():
            settings |= {f"{protocol}.enable": "true", f"{protocol}.port": "0", f"{protocol}.bind": "127.0.0.1"}
        daemon = start(settings)
        ports = {port: daemon.address_of(protocol).port for port, protocol in protocols.items()}
        ports[10005] = daemon.address_of("smockron-control").port
        ports[11215] = daemon.address_of("counter").port
        pages.run(name, text, tmp_path, ports | dict(others or {}))

    return run_text


@pytest.mark.parametrize("name", [name for name in PAGES if name not in (MIGRATION, BEHIND_NGINX, MANY_MACHINES)])
def test_what_a_page_says_is_what_happens(name: str, run: Callable[..., None]) -> None:
    run(PAGES[name], name)


@pytest.mark.needs("beanstalkd")
def test_the_guide_to_move_from_beanstalkd_works(run: Callable[..., None]) -> None:
    with reference.beanstalkd() as old:
        run(PAGES[MIGRATION], MIGRATION, {OLD_PORT: old.port})


@pytest.mark.needs("nginx")
def test_the_guide_to_throttle_behind_nginx_works(start: Callable[..., Daemon], tmp_path: Path) -> None:
    rules = tmp_path / "domains.json"
    rules.write_text(next(block.text for block in pages.blocks(PAGES[BEHIND_NGINX]) if block.info == "json"))
    options = re.search(r"`counterctl smockron gate (.+?)` on the host of nginx", PAGES[BEHIND_NGINX])
    assert options
    master = start({**SETTINGS, "smockron.rules": rules})
    with (
        proxies.gate(master, *options[1].split()) as gate,
        proxies.nginx(tmp_path, gate.served("listens on")[0], host="127.0.0.1") as where,
    ):
        pages.run(BEHIND_NGINX, PAGES[BEHIND_NGINX], tmp_path, {80: where.port})


@pytest.mark.needs("redis-server")
def test_the_guide_to_share_limits_between_machines_works(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """With the two configurations of the page, except for the ports, and the user that it creates."""
    page = pages.blocks(PAGES[MANY_MACHINES])
    user = next(block.text for block in page if block.text.startswith("ACL SETUSER"))
    credentials = tmp_path / "credentials"
    credentials.write_text("counterd:SECRET\n")
    directory = tmp_path / "servers"
    directory.mkdir()
    with cluster.single(directory, "--maxmemory-policy", "noeviction") as servers:
        servers.masters[0].client.execute_command(*user.split())
        daemons = []
        for block in (block for block in page if block.info == "ini"):
            settings = dict(line.split(" = ") for line in block.text.splitlines())
            assert settings["cluster.url"] == "redis://127.0.0.1:6379"
            assert settings.pop("counter.port") in ("11215", str(SECOND_PORT))
            daemons.append(start(settings | {"cluster.url": servers.url, "cluster.credentials": credentials}))
        wait_until(lambda: servers.recover() >= PARTITIONS, "the daemons have called each partition")
        first, second = (daemon.address_of("counter").port for daemon in daemons)
        pages.run(MANY_MACHINES, PAGES[MANY_MACHINES], tmp_path, {11215: first, SECOND_PORT: second})


def test_every_page_has_examples() -> None:
    """A guide without any, or a README whose examples are not found, would pass."""
    assert len(PAGES) >= 5
    for name, text in PAGES.items():
        found = [block for block in pages.blocks(text) if block.is_run]
        assert any(block.expected for block in found), name


def test_the_number_of_examples_that_are_not_run_is_limited() -> None:
    blocks = [block for text in PAGES.values() for block in pages.blocks(text) if pages.NOT_RUN.fullmatch(block.info)]
    found = Counter(block.info.split()[0] for block in blocks)
    assert all(found[language] <= most for language, most in NOT_RUN_MAX.items()), found


@pytest.mark.parametrize("name", PAGES | LINKED)
def test_links_have_targets(name: str) -> None:
    links = LINK.findall((PAGES | LINKED)[name])
    assert links
    for path, heading in links:
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), path
        if heading:
            headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_command_lines_of_counterbench_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are not run, since each takes seconds and a core; an option that does not exist any more is noticed here."""
    monkeypatch.chdir(tmp_path)
    shown = [line for line in LINKED["docs/counterbench.md"].splitlines() if line.startswith("counterbench ")]
    assert len(shown) >= 10
    for line in shown:
        words = shlex.split(line, comments=True)[1:]
        if words[0] != "compare":  # which wants its files to be there
            bench.main.make_context("counterbench", words)


@pytest.mark.needs("openssl")
def test_the_documented_certificates_satisfy_strict_clients(tmp_path: Path) -> None:
    """As Python 3.13 is by default. A client's certificate is not accepted as a server's."""
    openssl = needs.path("openssl")
    commands = re.search(r"```sh\n(new=.*?)```", LINKED["docs/operations.md"], re.DOTALL)
    assert commands
    subprocess.run(["sh", "-ec", commands[1]], cwd=tmp_path, check=True, capture_output=True)
    for certificate, purpose, is_good in (
        ("cert.pem", "sslserver", True),
        ("web1.pem", "sslclient", True),
        ("web1.pem", "sslserver", False),
    ):
        command = [openssl, "verify", "-x509_strict", "-CAfile", "ca.pem", "-purpose", purpose, certificate]
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
        assert (done.returncode == 0) == is_good, done.stderr


# ---- that an example which has rotted is found -----------------------------------------------------------------------

GOOD = """\
Before.

```python
from counterd.client import Client

client = Client()
client.acquire("a", maximum=2)
for each in range(2):
    print(client.get("a"), id(client), each)
```

```text
1 ... 0
1 ... 1
```
"""
CLOSED = "\nclient.close()"


def fenced(code: str, info: str = "python") -> str:
    return f"```{info}\n{code}\n```\n"


def test_correct_examples_pass(run: Callable[..., None]) -> None:
    """In order in one process, or in another; children too; and both protocols, blocking and for asyncio."""
    run(
        GOOD
        + fenced('print(client.get("a"), client.where)  # -> 1 127.0.0.1:11215' + CLOSED)
        + fenced('assert "client" not in globals()\nprint("fresh")  # -> fresh', "python fresh")
        + fenced(
            "import asyncio\nfrom counterd.client import aio, throttr\n"
            "async def main():\n    async with aio.Client() as client:\n"
            '        print(await client.acquire("b", 2, maximum=2))  # -> 2\n'
            "asyncio.run(main())\n"
            'with throttr.Client() as client:\n    print(client.insert("k", 1, 60))  # -> True'
        )
        + fenced("python -c 'from counterd.client import Client; Client().noop(); print(1)'  # -> 1", "sh run")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fenced("from counterd.client import Kounter"), r"page\.md\", line 2, in <module>(.|\n)*Kounter"),
        (GOOD + fenced("client.akquire('a')"), r"page\.md\", line 17, in <module>(.|\n)*akquire"),
        (GOOD + fenced('print(client.get("a"))  # -> 2' + CLOSED), r"page\.md:17: .*\['2'\], and it prints \['1'\]"),
        (fenced("print(1)"), r"page\.md:2: .*\[\], and it prints \['1'\]"),
        (fenced("print(1)\nprint(2)\nprint(3)  # -> 1"), r"and it prints \['1', '2', '3'\]"),
        (fenced("if 0:\n    print(1)  # -> 1"), r"\['1'\], and it prints \[\]"),
        (fenced("print(1)") + "\n```text\n2\n```\n", r"\['2'\], and it prints \['1'\]"),
        (fenced("print('a.c')  # -> a...c"), None),
        (fenced("print('abd')  # -> a...c"), r"prints \['abd'\]"),
        (fenced("import sys\nprint(1, file=sys.stderr)"), "exit status 0\n1"),
        (fenced("import sys\nsys.exit(3)"), "exit status 3"),
        (fenced("import socket\nsocket.socket()"), "ResourceWarning"),
        (fenced("import atexit\natexit.register(print, 'late')"), "printed after all examples were over: 'late"),
        (fenced("from counterd.client import Client\nClient(port=11216).noop()"), r"connects to 127\.0\.0\.1:11216"),
        (fenced("from counterd.client import Client\nClient('192.0.2.1').noop()"), r"connects to 192\.0\.2\.1:11215"),
        (fenced("counterd --nonsense", "sh run"), r"page\.md:2: exit status 2"),
        (fenced("echo a\nfalse\necho b", "sh run"), "exit status 1"),
        (fenced("echo a  # -> b", "sh run"), r"\['b'\], and it prints \['a'\]"),
    ],
)
def test_an_outdated_example_fails(text: str, message: str | None, run: Callable[..., None]) -> None:
    if message is None:
        run(text)
        return
    with pytest.raises(AssertionError, match=message):
        run(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fenced("1", "sh"), "line 1: 'sh' does not say whether it is run"),
        (fenced("1", "bash run"), "does not say whether it is run"),
        (fenced("1", "python not-run"), "does not say whether it is run"),
        (fenced("1", "python not-run: "), "does not say whether it is run"),
        ("a\n\n```python\n1\n", "line 3: this fence is not closed"),
        ("- a\n\n  ```python\n  1\n  ```\n", "line 3: an indented fence hides its block"),
        (fenced("print(1)  # -> 1") + fenced("1", "text"), "line 4: what is printed is said twice"),
    ],
)
def test_a_block_without_a_mark_is_refused(text: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        pages.blocks(text)


def test_blocks_that_are_not_run_have_a_reason() -> None:
    (block,) = pages.blocks(fenced("rm -r /", "sh not-run: it hurts"))
    assert not block.is_run
    assert pages.NOT_RUN.fullmatch(block.info)[2] == "it hurts"
    assert [block.info for block in pages.blocks(fenced("1", "text") + fenced("2", ""))] == ["text", ""]


def test_prose_separates_an_example_from_a_text() -> None:
    first, second = pages.blocks(fenced("pass") + "\nElsewhere:\n\n" + fenced("1", "text"))
    assert (first.expected, second.info) == ((), "text")


def test_the_documented_statistics_are_those_of_a_reply(start: Callable[..., Daemon]) -> None:
    """Each by its name, or by the part before the colon."""
    section = (
        (ROOT / "docs" / "protocols" / "counter.md").read_text("utf-8").partition("## Stats")[2].partition("\n## ")[0]
    )
    said = set(re.findall(r"`([a-z_]+(?::[a-z_*]+)?)`", section))
    with start().client() as client:
        replied = set(client.stats())
    families = {name.removesuffix("*") for name in said if name.endswith("*")}
    assert {name for name in replied - said if not name.startswith(tuple(families))} == set()
    gone = said - replied
    assert {name for name in gone if not any(each.startswith(name.rstrip("*")) for each in replied)} == set()
