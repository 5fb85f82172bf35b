"""The files in deploy/ are right, as far as that can be checked without the systems that they are for."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement

from counterd.cli.ctl.smockron.gate import DEFAULT, gate
from counterd.control.config.keys import settings_for
from counterd.control.config.loading import load
from counterd.protocols import find_protocols
from kit import needs

if TYPE_CHECKING:
    from counterd.control.config.loading import Config

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
PROGRAM = re.compile("/opt/counterd/bin/(counterd|counterctl)")
SERVICES = ("counterd.service", "counterd-gate.service")
EXPOSURE_MAX = 2.0


@pytest.fixture
def analyze() -> str:
    return needs.path("systemd-analyze")


# ---- systemd ----


@pytest.mark.needs("systemd-analyze")
def test_systemd_understands_the_units(analyze: str, tmp_path: Path) -> None:
    units = []
    for unit in (*(SYSTEMD / name for name in SERVICES), SYSTEMD / "counterd.socket"):
        units.append(tmp_path / unit.name)
        units[-1].write_text(PROGRAM.sub("/bin/true", unit.read_text("utf-8")))  # it has to be there
    done = subprocess.run([analyze, "verify", "--man=no", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("service", SERVICES)
def test_the_service_has_few_rights(service: str, analyze: str) -> None:
    command = [analyze, "security", "--offline=true", "--no-pager", SYSTEMD / service]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    exposure = re.search(rf"Overall exposure level for {re.escape(service)}: ([0-9.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) < EXPOSURE_MAX


def test_the_documented_journal_is_in_a_folder_of_the_daemon() -> None:
    guide = (ROOT / "docs" / "guides" / "from-beanstalkd.md").read_text("utf-8")
    journal = re.search(r"^beanstalk\.journal = (.+)$", guide, re.MULTILINE)
    assert journal
    directory = Path(journal[1]).parent
    unit = (SYSTEMD / "counterd.service").read_text("utf-8")
    state = re.search(r"^StateDirectory=(.+)\nStateDirectoryMode=0700$", unit, re.MULTILINE)
    assert state
    assert Path("/var/lib", state[1]) == directory
    assert re.search(rf"--owner=counterd .*--mode=700 {directory}$", dict(instructions()[-1])["RUN"])


# ---- the container ----


def instructions() -> list[list[tuple[str, str]]]:
    """The instructions of the Containerfile, by stage: each as its word and the rest."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINERFILE.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = [[]]
    for line in text.splitlines():
        if line:
            word, _, rest = line.partition(" ")
            if word == "FROM":
                stages.append([])
            stages[-1].append((word, rest.strip()))
    return stages


def test_the_image_runs_unprivileged_and_has_a_healthcheck() -> None:
    _, build, final = instructions()
    assert ("FROM", "${BASE} AS build") in build
    last = dict(final)
    assert (last["USER"], last["STOPSIGNAL"], last["ENTRYPOINT"]) == ("10001:10001", "SIGTERM", '["counterd"]')
    options, _, command = last["HEALTHCHECK"].partition("CMD ")
    program, _, code = json.loads(command)
    assert program == "python"
    ast.parse(code)
    host, port = settings_for(())["admin.bind"].default.rsplit(":", 1)
    assert f"'http://{host}:{port}/readyz'" in code
    assert "--timeout=3s" in options


def test_the_files_of_the_image_are_in_its_build_context() -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    copied = [
        source
        for word, rest in itertools.chain(*instructions())
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert {"src", "setup.py"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert any(source == each or source.startswith(f"{each}/") for each in allowed), source


def test_the_packages_of_the_image_are_pinned() -> None:
    declared = map(Requirement, metadata.requires("counterd") or ())
    extras = [{"extra": "admin"}, {"extra": "cli"}, {"extra": "redis"}]
    needed = [each for each in declared if each.marker is None or any(map(each.marker.evaluate, extras))]
    build = re.findall(r"^[A-Za-z].*", (CONTAINERFILE.with_name("build.in")).read_text("utf-8"), re.MULTILINE)
    assert json.dumps(build) in (ROOT / "pyproject.toml").read_text("utf-8")
    for requirements, lock in [(needed, "requirements.lock"), (map(Requirement, build), "build.lock")]:
        for each in requirements:
            assert each.specifier.contains(pins(lock)[each.name.lower()]), lock


def pins(lock: str) -> dict[str, str]:
    """The versions in a file of pinned requirements, each of which must have a hash."""
    text = (CONTAINERFILE.parent / lock).read_text("utf-8")
    found = re.findall(r"^([\w.-]+)==(\S+)(?: ;[^\\\n]*)? \\\n +--hash=sha256:", text, re.MULTILINE)
    assert len(found) == text.count("==")
    return dict(found)


def test_the_configuration_of_the_image_is_right() -> None:
    config = load(CONTAINERFILE.with_name("counterd.conf"), (), find_protocols())
    assert config.warnings == ()
    assert config.values["admin.enable"]


# ---- Kubernetes ----


@pytest.fixture(scope="module")
def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration, and the description of the pod."""
    configuration, deployment = yaml.safe_load_all((ROOT / "deploy/kubernetes/sidecar.yaml").read_text("utf-8"))
    assert (configuration["kind"], deployment["kind"]) == ("ConfigMap", "Deployment")
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    return configuration, template["spec"]


@pytest.fixture
def sidecar(kubernetes: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    (container,) = kubernetes[1]["initContainers"]
    return container


@pytest.fixture
def served(kubernetes: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> Config:
    """The configuration that the sidecar reads from its ConfigMap."""
    (name, text), *others = kubernetes[0]["data"].items()
    assert (name, others) == ("counterd.conf", [])
    path = tmp_path / name
    path.write_text(text)
    return load(path, (), find_protocols())


def test_the_sidecar_starts_before_the_application_and_has_probes(sidecar: dict[str, Any], served: Config) -> None:
    assert sidecar["restartPolicy"] == "Always"
    (port,) = sidecar["ports"]
    assert served.values["admin.bind"] == f"0.0.0.0:{port['containerPort']}"
    probes = {kind: sidecar[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/livez",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}


def test_the_sidecar_has_no_rights(sidecar: dict[str, Any]) -> None:
    context = sidecar["securityContext"]
    user = dict(instructions()[-1])["USER"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert sidecar["resources"]["limits"]["memory"]


def test_the_socket_is_shared(
    kubernetes: tuple[dict[str, Any], dict[str, Any]], sidecar: dict[str, Any], served: Config
) -> None:
    _, pod = kubernetes
    (application,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    ours = {mount["mountPath"]: mount["name"] for mount in sidecar["volumeMounts"]}
    theirs = {mount["mountPath"]: mount["name"] for mount in application["volumeMounts"]}
    folder = str(Path(served.values["counter.socket"]).parent)
    assert ours[folder] == theirs[folder]
    assert "emptyDir" in volumes[ours[folder]]
    assert "subPath" not in str(sidecar["volumeMounts"])
    assert volumes[ours["/etc/counterd"]]["configMap"]["name"] == kubernetes[0]["metadata"]["name"]
    (url,) = (each["value"] for each in application["env"] if each["name"] == "COUNTERD_URL")
    assert url == f"counter+unix://{served.values['counter.socket']}"
    assert pod["securityContext"]["fsGroup"] == sidecar["securityContext"]["runAsGroup"]


def test_the_grace_period_of_the_pod_covers_the_drain(
    kubernetes: tuple[dict[str, Any], dict[str, Any]], served: Config
) -> None:
    assert served.values["drain.mode"] == "wait"
    assert kubernetes[1]["terminationGracePeriodSeconds"] > served.values["drain.timeout"] + 10


# ---- proxies, which ask the gate; tests/functional/test_gate.py runs two of them ----


@pytest.mark.parametrize(
    "name", ["nginx/counterd.conf", "traefik/counterd.yml", "caddy/Caddyfile", "envoy/counterd.yaml"]
)
def test_proxies_use_the_gates_default_address(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text("utf-8")
    if name.endswith(("yml", "yaml")):
        assert isinstance(yaml.safe_load(text), dict)
    host, port = DEFAULT.split(":")
    assert re.search(rf"{host}:{port}|address: {host}, port_value: {port}\b", text)
    is_needed = name.startswith(("nginx", "envoy"))  # which know no other
    assert ("--rejected-status 403" in text) == is_needed


@pytest.mark.parametrize(
    ("name", "timeout"),
    [
        ("nginx/counterd.conf", r"proxy_read_timeout (\d+)s;"),
        ("caddy/Caddyfile", r"response_header_timeout (\d+)s\n"),
        ("envoy/counterd.yaml", r" timeout: (\d+)s\n"),
    ],
)
def test_the_timeouts_of_proxies_exceed_the_longest_delay(name: str, timeout: str) -> None:
    (seconds,) = re.findall(timeout, (ROOT / "deploy" / name).read_text("utf-8"))
    (max_delay,) = (each.default for each in gate.params if each.name == "max_delay")
    assert int(seconds) > max_delay


# ---- alerts ----


def test_each_alert_has_a_runbook() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    runbook = (ROOT / "docs/operations.md").read_text("utf-8").partition("\n## Runbook\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.+)$", runbook, re.MULTILINE) == alerts
    urls = [rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"]]
    assert urls == [f"docs/operations.md#{alert.lower()}" for alert in alerts]
