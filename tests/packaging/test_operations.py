"""Files for running the server beside other things: each against its own schema, and against what the server has.

Compose files against the Compose specification (vendored by check-jsonschema), manifests against Kubernetes' schemas
(kubernetes-validate), expressions by a parser of PromQL, and their metrics against what a server prints.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

from ktransformers.cli.serve.command import server_parser
from ktransformers.cluster.config import ClusterArgs
from ktransformers.core import FinishReason, GenerationStats
from ktransformers.scheduler.commands import EngineTotals
from ktransformers.scheduler.records import SchedulerStats
from ktransformers.scheduler.tier_records import TierStats
from ktransformers.server.backend.balance_stats import BalanceStats, ClusterStats, ReplicaFigures
from ktransformers.server.telemetry.metrics import Metrics, Refusals

ROOT = Path(__file__).parents[2]
DOCKER, KUBERNETES = ROOT / "docker", ROOT / "examples" / "kubernetes"
COMPOSE = ["compose.yaml", "compose.cuda.yaml", "compose.keys.yaml"]
DASHBOARD = DOCKER / "grafana" / "dashboards" / "ktransformers.json"
SCRAPES = ["prometheus.yml", "prometheus.keys.yml"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


# Compose.


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_are_what_the_specification_says(name: str) -> None:
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(read(DOCKER / name), json.loads(schema.read_text()))


@pytest.mark.parametrize("name", COMPOSE)
def test_what_compose_files_mount_and_build_is_there(name: str) -> None:
    """Files that the user makes are the ones that git leaves out."""
    compose = read(DOCKER / name)
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"]
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    own = [secret["file"] for secret in compose.get("secrets", {}).values()]
    left_out = (ROOT / ".gitignore").read_text().splitlines()
    assert all(path.startswith("./secrets/") for path in own)
    assert {"/docker/secrets/", "/docker/ktransformers.env"} <= set(left_out)
    assert {"docker/secrets", "docker/ktransformers.env"} <= set((ROOT / ".dockerignore").read_text().splitlines())


def test_ports_are_this_machines_own() -> None:
    services = read(DOCKER / "compose.yaml")["services"].values()
    ports = [port for service in services for port in service["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_have_versions() -> None:
    images = [service["image"] for service in read(DOCKER / "compose.yaml")["services"].values()]
    assert [image.partition(":")[2] for image in images if "/" in image] != []
    assert all(image.partition(":")[2] not in ("", "latest") for image in images)


# Prometheus.


@pytest.mark.parametrize("name", SCRAPES)
def test_prometheus_asks_the_server_by_a_name_that_it_answers_to(name: str) -> None:
    config, services = read(DOCKER / "prometheus" / name), read(DOCKER / "compose.yaml")["services"]
    (scrape,) = config["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert services[host]["hostname"] == host  # what a Host header may say, see server/http/hosts.py
    assert services[host]["ports"][0].endswith(f":{port}")
    mounted = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert set(config["rule_files"]) <= set(mounted)
    if "authorization" in scrape:
        secrets = read(DOCKER / "compose.keys.yaml")["services"]["prometheus"]["secrets"]
        assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secrets[0]}"


class _Backend:
    """Has everything that a server may show."""

    def stats(self) -> BalanceStats:
        filled = dict.fromkeys(SchedulerStats.__struct_fields__, 1)
        tiers = TierStats(**dict.fromkeys(TierStats.__struct_fields__, 1))
        scheduler = SchedulerStats(**{**filled, "tiers": tiers})
        one = BalanceStats(num_running=1, num_waiting=1, scheduler=scheduler, engine=EngineTotals())
        replicas = [ReplicaFigures("r", "node", 1, None, one)]
        return ClusterStats(num_running=1, num_waiting=1, scheduler=scheduler, engine=one.engine, replicas=replicas)


@pytest.fixture(scope="module")
def shown() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of what /metrics shows, by the names of the samples."""
    metrics = Metrics(_Backend(), "m")  # type: ignore[arg-type]
    metrics.finished(FinishReason.STOP, GenerationStats(prompt_len=1, completion_len=1), 1.0)
    found: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(metrics.render(Refusals())[0].decode()):
        for sample in family.samples:
            found[sample.name] = (family.type, set(sample.labels))
    return found


def _parsed(expression: str) -> promql_parser.Expr:
    for variable, value in (("$__rate_interval", "5m"), ("$model", "m")):
        expression = expression.replace(variable, value)
    return promql_parser.parse(expression)


def _selectors(node: Any, function: str = "") -> Iterator[tuple[Any, str]]:
    """Vector selectors below a node, with the function of the range that they are asked for, if any."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node, function
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector, function
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _selectors(argument, node.func.name)
    else:
        for name in ("lhs", "rhs", "expr", "param"):
            if getattr(node, name, None) is not None:
                yield from _selectors(getattr(node, name))


def _dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def _alerts() -> list[Any]:
    return [rule for group in read(DOCKER / "prometheus" / "alerts.yml")["groups"] for rule in group["rules"]]


_EXPRESSIONS = [
    *(target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", [])),
    *(rule["expr"] for rule in _alerts()),
]
_OVER_TIME = {"rate", "increase"}


@pytest.mark.parametrize("expression", _EXPRESSIONS)
def test_expressions_ask_for_what_the_server_shows(expression: str, shown: dict[str, tuple[str, set[str]]]) -> None:
    """Metrics exist, have the labels that are asked for, and are taken over time where they only grow."""
    selectors = list(_selectors(_parsed(expression)))
    assert selectors
    for selector, function in selectors:
        if selector.name == "up":
            continue
        assert selector.name in shown, f"{selector.name} is no metric"
        kind, labels = shown[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels
        assert (function in _OVER_TIME) == (kind in ("counter", "histogram")), f"{selector.name} is a {kind}"


def test_every_metric_is_on_the_dashboard(shown: dict[str, tuple[str, set[str]]]) -> None:
    asked = {selector.name for expression in _EXPRESSIONS for selector, _ in _selectors(_parsed(expression))}
    parts = {name for name, (kind, _) in shown.items() if kind == "histogram" and not name.endswith("_bucket")}
    created = {name for name in shown if name.endswith("_created")}
    assert set(shown) - asked - parts - created == {"ktransformers:hot_expert_uploads_total"}


def test_legends_name_labels_that_are_there() -> None:
    for panel in _dashboard()["panels"]:
        for target in panel.get("targets", []):
            fields = {part.partition("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            assert fields <= {"model_name", "finished_reason", "outcome", "replica"}


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    panels, taken = _dashboard()["panels"], set[tuple[int, int]]()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_alerts_name_flags_that_exist() -> None:
    flags = {option for action in server_parser()._actions for option in action.option_strings}
    for rule in _alerts():
        assert {"alert", "expr", "labels", "annotations"} <= set(rule)
        words = {word.strip(".,;()") for word in rule["annotations"]["description"].split()}
        assert {word for word in words if word.startswith("--")} <= flags


def test_grafana_finds_its_source_and_its_dashboards() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = read(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    (provider,) = read(provisioning / "dashboards" / "ktransformers.yaml")["providers"]
    services = read(DOCKER / "compose.yaml")["services"]
    assert source["url"].removeprefix("http://").partition(":")[0] in services
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


# Kubernetes.


@pytest.mark.parametrize("document", documents("ktransformers.yaml"), ids=lambda document: document["kind"])
def test_manifests_are_what_kubernetes_says(document: Any) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_manifests_fit_each_other_and_the_server() -> None:
    found = {document["kind"]: document for document in documents("ktransformers.yaml")}
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert container["envFrom"][0]["configMapRef"]["name"] == found["ConfigMap"]["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    data = found["ConfigMap"]["data"]
    flags = {option.lstrip("-") for action in server_parser()._actions for option in action.option_strings}
    assert {name.removeprefix("KTRANSFORMERS_").lower() for name in data} <= flags
    keys = next(mount for mount in container["volumeMounts"] if mount["name"] == "keys")["mountPath"]
    assert data["KTRANSFORMERS_API_KEY_FILE"] == f"{keys}/{volumes['keys']['secret']['items'][0]['path']}"
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(data["KTRANSFORMERS_DRAIN_SECONDS"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > waits
    assert container["resources"]["limits"]["cpu"] == data["KTRANSFORMERS_CPU_INFER"]


def test_the_prometheus_operator_finds_the_server() -> None:
    """Its kind is no part of Kubernetes: the fields are those of monitoring.coreos.com/v1 that are used."""
    (monitor,) = documents("servicemonitor.yaml")
    found = {document["kind"]: document for document in documents("ktransformers.yaml")}
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= found["Service"]["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == found["Service"]["spec"]["ports"][0]["name"]
    volumes = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    secret = next(volume["secret"] for volume in volumes if "secret" in volume)
    assert endpoint["authorization"]["credentials"]["name"] == secret["secretName"]


# KubeRay. Its kind's schema is a megabyte: the fields that are used are named here, as its CRD (ray.io/v1) has them,
# and its pods are held to Kubernetes' own.

_FIELDS = {
    "spec": {"serveConfigV2", "rayClusterConfig"},
    "rayClusterConfig": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"
    },
}  # fmt: skip


def _ray_service() -> Any:
    (document,) = documents("rayservice.yaml")
    return document


def _groups() -> list[Any]:
    config = _ray_service()["spec"]["rayClusterConfig"]
    return [config["headGroupSpec"], *config["workerGroupSpecs"]]


def test_the_ray_service_has_kuberays_fields() -> None:
    document = _ray_service()
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    config = document["spec"]["rayClusterConfig"]
    assert set(document["spec"]) <= _FIELDS["spec"]
    assert set(config) <= _FIELDS["rayClusterConfig"]
    assert set(config["headGroupSpec"]) <= _FIELDS["headGroupSpec"]
    for group in config["workerGroupSpecs"]:
        assert set(group) <= _FIELDS["workerGroupSpecs"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    params = [value for group in _groups() for value in group["rayStartParams"].values()]
    assert all(isinstance(value, str) for value in params)  # words of a command line


@pytest.mark.parametrize("group", _groups(), ids=lambda group: group.get("groupName", "head"))
def test_rays_pods_are_what_kubernetes_says(group: Any) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    mounts = [mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_the_ray_service_runs_our_application() -> None:
    serve = yaml.safe_load(_ray_service()["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    args = ClusterArgs.model_validate(application["args"])
    head, worker = _groups()
    pod = worker["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert float(limits["cpu"]) == args.replicas.cpus
    assert float(limits["memory"].removesuffix("Gi")) > args.replicas.memory
    assert (worker["minReplicas"], worker["maxReplicas"]) == (args.replicas.least, args.replicas.most)
    assert pod["terminationGracePeriodSeconds"] > args.replicas.drain_seconds
    mounts = {mount["mountPath"] for mount in head["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert str(args.api_key_file.parent) in mounts
    assert str(args.engine.gguf_path.parent) in mounts
    ports = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert ports["serve"] == serve["http_options"]["port"]


def test_rays_image_has_the_version_that_is_asked_for() -> None:
    version = _ray_service()["spec"]["rayClusterConfig"]["rayVersion"]
    recipe = (DOCKER / "Dockerfile.ray").read_text()
    assert f"rayproject/ray:{version}-" in recipe
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert '".[cluster]"' in recipe
    (ray,) = (Requirement(text) for text in project["optional-dependencies"]["cluster"])
    assert ray.name == "ray"
    assert ray.specifier.contains(version)
