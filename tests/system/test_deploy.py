"""deploy/: the Dockerfile, Prometheus, the dashboard and the manifests for Kubernetes, by their own tools."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from tests.system.deploy_tools import DEPLOY, fetch, run, serving, tool, until

from dragoman.client import Client
from dragoman.errors import DragomanError
from dragoman.metrics import ServerMetrics
from dragoman.retries import NO_RETRIES
from dragoman.settings import read_settings

KUBERNETES = DEPLOY / "kubernetes"
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/dragoman.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
# What the kinds of others are; kubernetes-validate knows those of Kubernetes itself.
FOREIGN = ("Kustomization", "ScaledObject", "InferenceService")

Ask = Callable[[str], list[dict[str, Any]]]


def test_the_dockerfile_is_clean():
    """hadolint finds nothing."""
    assert run(tool("hadolint"), str(DEPLOY / "Dockerfile")) == ""


def test_prometheus_files_are_valid_and_each_alert_fires_when_it_should():
    """promtool checks configuration and rules, and runs the rules' own tests; no alert is without one."""
    promtool, folder = tool("promtool"), DEPLOY / "prometheus"
    run(promtool, "check", "config", "prometheus.yml", cwd=folder)
    run(promtool, "test", "rules", "alerts_test.yml", cwd=folder)
    tests = yaml.safe_load((folder / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in ALERTS}


def test_each_alert_is_explained():
    """The operations page has a line for each."""
    page = (DEPLOY / "README.md").read_text()
    assert [rule["alert"] for rule in ALERTS if f"`{rule['alert']}`" not in page] == []


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Queries of a Prometheus that has watched a server which answered, and refused, some requests."""
    prometheus = tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus/alerts.yml")]
    with serving() as (_, ready), socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        (job,) = config["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ready['metrics_port']}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
        with subprocess.Popen([prometheus, *flags, "--log.level=error"], cwd=folder) as process:

            def query(expression: str) -> list[dict[str, Any]]:
                page = fetch(f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
                found: list[dict[str, Any]] = json.loads(page)["data"]["result"] if page else []
                return found

            try:
                until("Prometheus reads the server's metrics", lambda: query("up == 1"))
                call(ready["port"])
                yield query
            finally:
                process.kill()


def call(port: int) -> None:
    """Some requests that end well, and one that does not."""
    with Client(f"127.0.0.1:{port}", retries=NO_RETRIES) as client:
        for _ in range(4):
            client.generate("language")
    with Client(f"127.0.0.1:{port}", model="none", retries=NO_RETRIES) as client, pytest.raises(DragomanError):
        client.generate("language")


def test_prometheus_has_every_series_that_dashboard_and_alerts_use(ask):
    """Of a real server, read by a real Prometheus."""
    variables = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    text = "\n".join((*EXPRESSIONS, *variables, *(rule["expr"] for rule in ALERTS)))
    names = sorted(set(re.findall(r"\b(?:dragoman|process|grpc)_[a-z0-9_]+", text)))
    assert len(names) > 20
    for name in names:
        until(f"there is no {name}", lambda name=name: ask(f"count({name})"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_line_of_the_dashboard_has_data(ask, expression):
    """None is empty when there was traffic."""
    asked = expression.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")
    assert until(asked, lambda: ask(asked))


def test_no_alert_fires_where_all_is_well(ask):
    """A server that answers is no reason to wake anybody."""
    assert ask('ALERTS{alertstate="firing"}') == []


def manifests() -> dict[str, dict[str, Any]]:
    """All objects for Kubernetes by the file that they are in; a patch is merged into what it patches."""
    found = {}
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        if "kind" in content:
            found[str(path.relative_to(KUBERNETES))] = content
    found["gpu/gpu.yaml"] = merged(found["base/deployment.yaml"], found["gpu/gpu.yaml"])
    return found


def merged(base: Any, patch: Any) -> Any:
    """What kustomize makes of the two: tables key by key, named items by name, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and all(isinstance(item, dict) and "name" in item for item in (*base, *patch)):
        by_name = {item["name"]: item for item in base}
        for item in patch:
            by_name[item["name"]] = merged(by_name.get(item["name"]), item)
        return list(by_name.values())
    return copy.deepcopy(patch)


def containers() -> list[dict[str, Any]]:
    """The servers of all manifests."""
    found = []
    for content in manifests().values():
        if content["kind"] == "Deployment":
            found += content["spec"]["template"]["spec"]["containers"]
        elif content["kind"] == "InferenceService":
            found += content["spec"]["predictor"]["containers"]
    return found


def test_kubernetes_manifests_are_valid(tmp_path):
    """By the published schemas, without a field that they do not have; KServe's pods by those of a Deployment."""
    contents = manifests()
    service = contents["kserve/inferenceservice.yaml"]
    predictor = {key: service["spec"]["predictor"][key] for key in ("containers", "volumes")}
    pods = copy.deepcopy(contents["base/deployment.yaml"])
    pods["spec"]["template"]["spec"] = predictor
    files = []
    for name, content in {**contents, "kserve/pods.yaml": pods}.items():
        if content["kind"] not in FOREIGN:
            path = tmp_path / name.replace("/", "-")
            path.write_text(yaml.safe_dump(content))
            files.append(str(path))
    printed = run(tool("kubernetes-validate"), "--strict", *files)
    assert printed.count("passed for resource") == len(files)


def test_kustomizations_name_files_that_are_there():
    """Resources and patches."""
    for name, content in manifests().items():
        if content["kind"] == "Kustomization":
            paths = [*content["resources"], *(patch["path"] for patch in content.get("patches", ()))]
            assert [path for path in paths if not (KUBERNETES / name).parent.joinpath(path).exists()] == [], name


def test_what_containers_are_told_are_settings_and_threads_match_their_cpus():
    """Environment variables are ones that the server takes; as many threads as CPUs, which are limited."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["dragoman"]
    told = [({key: str(value) for key, value in compose["environment"].items()}, compose["deploy"]["resources"])]
    for container in containers():
        told.append(({it["name"]: it["value"] for it in container["env"]}, container["resources"]))
    for environment, resources in told:
        read_settings(environment=environment).check()
        assert environment["DRAGOMAN_THREADS"] == str(
            resources["limits"]["cpus" if "cpus" in resources["limits"] else "cpu"]
        )


def test_pods_have_time_to_drain():
    """Kubernetes waits for what comes before the drain, and for the drain."""
    pod = manifests()["base/deployment.yaml"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {it["name"]: it["value"] for it in container["env"]}
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > before + float(environment["DRAGOMAN_DRAIN_SECONDS"])


def test_pods_are_locked_down():
    """Not root, no writable root, no privileges."""
    for container in containers():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_autoscalers_read_a_metric_that_there_is():
    """Both ways to scale look at the same number."""
    contents = manifests()
    pods = contents["hpa/horizontalpodautoscaler.yaml"]["spec"]["metrics"][0]["pods"]
    trigger = contents["keda/scaledobject.yaml"]["spec"]["triggers"][0]["metadata"]
    name = pods["metric"]["name"]
    assert name in {description.name for description in ServerMetrics().descriptions}
    assert trigger["query"] == f"sum({name})"
    assert trigger["threshold"] == pods["target"]["averageValue"]
    assert name in (KUBERNETES / "hpa/adapter-rules.yaml").read_text()


def test_compose_mounts_files_that_are_there():
    """Each path on this side of a mount exists."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())]
    paths = [DEPLOY / mount for mount in mounts if mount.startswith(".")]
    assert len(paths) == 4
    assert [str(path) for path in paths if not path.exists()] == []
