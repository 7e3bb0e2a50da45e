"""The Helm chart: what it renders is valid, and fits the server as it behaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from server import __version__
from server.config.sources import load_config
from server.serving import ABORT_GRACE_S
from tests.deploy.custom_resources import SPECS, schema

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "kubernetes"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
EVERYTHING = (
    "autoscaling.kind=hpa,persistence.accessModes={ReadWriteMany},apiKeys.existingSecret=k,tls.existingSecret=t,"
    "metrics.names=both,metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true,"
    "metrics.dashboards.enabled=true,inferencePool.enabled=true,inferencePool.gateway=g,gpu.count=2,"
    "gpu.runtimeClassName=nvidia,priorityClassName=high,service.annotations.a=b,persistence.storageClass=fast"
)
# What kubeVersion in Chart.yaml admits at the least, and the newest there are schemas of.
VERSIONS = ("1.27", kubernetes_validate.latest_version())

HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
pytestmark = pytest.mark.skipif(
    HELM is None, reason="no helm for this platform; on Linux x86_64 `make test-all` fetches it"
)


def helm(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    line = [HELM, command, *arguments]
    return subprocess.run(line, cwd=CHART, capture_output=True, text=True, check=False, timeout=30)


@cache
def render(*arguments: str) -> tuple[dict[str, Any], ...]:
    done = helm("template", "nf4", ".", "--namespace", "models", *arguments)
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def one(objects: tuple[dict[str, Any], ...], kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def container(objects: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    (found,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def validate(document: dict[str, Any]) -> None:
    if (document["apiVersion"], document["kind"]) in SPECS:
        jsonschema.validate(document, schema(document["apiVersion"], document["kind"]))
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


CASES = {"default": (), "everything": ("--set", EVERYTHING)} | {path.stem: ("--values", str(path)) for path in EXAMPLES}


@pytest.mark.parametrize("case", CASES)
def test_lint_and_schemas(case: str) -> None:
    done = helm("lint", "--strict", ".", *CASES[case])
    assert done.returncode == 0, done.stdout + done.stderr
    objects = render(*CASES[case])
    for document in objects:
        validate(document)
        assert document["metadata"].get("namespace", "models") == "models"
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(names) == len(set(names))


def test_a_wrong_field_is_noticed() -> None:
    deployment = json.loads(json.dumps(one(render(), "Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        validate(deployment)
    monitor = json.loads(json.dumps(one(render(*CASES["gpu"]), "ServiceMonitor")))
    monitor["spec"]["endpoints"][0]["ports"] = "http"
    with pytest.raises(jsonschema.ValidationError, match="ports"):
        validate(monitor)


def test_every_kind_is_rendered_somewhere() -> None:
    kinds = {(each["apiVersion"], each["kind"]) for arguments in CASES.values() for each in render(*arguments)}
    assert set(SPECS) <= kinds
    assert {kind for _, kind in kinds} >= {
        *("Deployment", "Service", "ServiceAccount", "ConfigMap", "PersistentVolumeClaim"),
        *("PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_its_configuration(case: str, tmp_path: Path) -> None:
    objects = render(*CASES[case])
    maps = [each for each in objects if each["kind"] == "ConfigMap" and "config.yaml" in each["data"]]
    (path := tmp_path / "config.yaml").write_text(maps[0]["data"]["config.yaml"])
    config = load_config(path)
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    stop = int(container(objects)["lifecycle"]["preStop"]["exec"]["command"][1])
    # uvicorn ends what is left after the drain and ABORT_GRACE_S; then the engine gets some seconds to leave.
    assert pod["terminationGracePeriodSeconds"] >= stop + config.http.drain_timeout_s + ABORT_GRACE_S + 10


def test_large_numbers_stay_whole(tmp_path: Path) -> None:
    given = {"config": {"http": {"max_queue_tokens": 2000000}, "engine": {"kv_cache_bytes": 64 << 30}}}
    (values := tmp_path / "values.yaml").write_text(yaml.safe_dump(given))
    (path := tmp_path / "config.yaml").write_text(
        one(render("--values", str(values)), "ConfigMap")["data"]["config.yaml"]
    )
    config = load_config(path)
    assert (config.http.max_queue_tokens, config.engine.kv_cache_bytes) == (2000000, 64 << 30)


def test_no_variable_of_a_service_reaches_the_server() -> None:
    """Kubernetes would set NF4_SERVER_PORT and others for a Service nf4-server, which load_config() refuses."""
    assert one(render(), "Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("case", CASES)
def test_pods_have_no_more_rights_than_they_need(case: str) -> None:
    objects = render(*CASES[case])
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    user = next(line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("USER"))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert str(pod["securityContext"]["runAsUser"]) == str(pod["securityContext"]["fsGroup"]) == user
    assert pod["automountServiceAccountToken"] is False
    security = container(objects)["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container(objects)["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/models", "/tmp", "/dev/shm"}


def test_gpus_and_images() -> None:
    assert "nvidia.com/gpu" not in json.dumps(render())
    assert container(render())["image"] == f"nf4-server:{__version__}-cpu"
    objects = render("--set", EVERYTHING)
    assert container(objects)["image"] == f"nf4-server:{__version__}"
    assert container(objects)["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container(objects)["resources"]["limits"]["memory"] == "8Gi"
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["runtimeClassName"] == "nvidia"
    assert "replicas" not in one(objects, "Deployment")["spec"]


def test_tls_and_keys_reach_server_and_probes() -> None:
    objects = render("--set", EVERYTHING)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(objects)[probe]["httpGet"]["scheme"] == "HTTPS"
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    http = yaml.safe_load(maps["nf4-nf4-server"]["config.yaml"])["http"]
    assert (http["api_keys_file"], http["tls_cert_file"]) == ("/etc/nf4/keys/keys", "/etc/nf4/tls/tls.crt")
    mounts = {mount["mountPath"]: mount["name"] for mount in container(objects)["volumeMounts"]}
    assert (mounts["/etc/nf4/keys"], mounts["/etc/nf4/tls"]) == ("keys", "tls")
    # Grafana's sidecar gets the dashboards as they are in docker/.
    for name in ("nf4", "overview"):
        given = (ROOT / f"docker/grafana/dashboards/{name}.json").read_text()
        assert json.loads(maps[f"nf4-nf4-server-{name}"][f"{name}.json"]) == json.loads(given)
    rules = yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())
    assert one(objects, "PrometheusRule")["spec"] == rules


def test_a_change_of_the_configuration_rolls_pods_over() -> None:
    def checksum(*arguments: str) -> str:
        pod = one(render(*arguments), "Deployment")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum("--set", "replicas=1")
    assert checksum() != checksum("--set", "config.http.max_queue=64")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("replicas=2", "persistence.accessModes"),
        ("rollingUpdate.maxSurge=1", "persistence.accessModes"),
        ("gpu.cuont=1", "cuont"),
        ("replicas=many", "/replicas"),
        ("config.http.port=9000", "config.http.port"),
        ("config.model=x", "config.model"),
        ("inferencePool.enabled=true", "metrics.names"),
        ("autoscaling.kind=hpa,metrics.names=vllm,persistence.enabled=false", "metrics.names"),
        ("autoscaling.kind=always", "/autoscaling/kind"),
    ],
)
def test_bad_values_are_named(values: str, said: str) -> None:
    done = helm("template", "nf4", ".", "--set", values)
    assert done.returncode != 0
    assert said in done.stderr
