"""deployments/kuberay.yaml: a RayService whose pods fit what its deployments ask for. Nothing is started."""

import os
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from specdec.cluster.deploy_checks import DEPLOYMENT_NAMES
from specdec.cluster.deploy_config import load_deploy_config, parse_deploy_config
from specdec.cluster.server import SERVE_ENVIRONMENT

ROOT = Path(__file__).parents[2]


@pytest.fixture
def documents():
    return list(yaml.safe_load_all((ROOT / "deployments" / "kuberay.yaml").read_text(encoding="utf-8")))


@pytest.fixture
def spec(documents):
    return documents[0]["spec"]


@pytest.fixture
def serve_config(spec):
    return yaml.safe_load(spec["serveConfigV2"])


@pytest.fixture
def groups(spec):
    """Head and worker groups by the label their nodes carry."""
    cluster = spec["rayClusterConfig"]
    return {
        group["labels"]["pool"]: group for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    }


def container(group):
    (only,) = group["template"]["spec"]["containers"]
    return only


def test_it_is_a_ray_service_and_a_service_for_grpc(documents):
    kinds = [(document["apiVersion"], document["kind"]) for document in documents]
    assert kinds == [("ray.io/v1", "RayService"), ("v1", "Service")]


@pytest.mark.skipif(
    "KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD names no file ray.io_rayservices.yaml"
)
def test_it_fits_kuberays_own_schema_and_has_no_key_that_this_does_not_know(documents):
    resource = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text(encoding="utf-8"))
    (version,) = [item for item in resource["spec"]["versions"] if item["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(documents[0], schema)


def closed(schema):
    """The schema with unknown keys refused: the API server would drop them without a word."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if isinstance(result.get("properties"), dict) and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def test_serve_and_specdec_accept_what_it_deploys(serve_config):
    ServeDeploySchema.model_validate(serve_config)
    config = parse_deploy_config(serve_config)
    assert [item.name for item in config.schema.applications[0].deployments] == list(DEPLOYMENT_NAMES)


def test_the_models_are_those_of_the_deployment_on_small_and_large_gpus(serve_config):
    ours = parse_deploy_config(serve_config).app
    other = load_deploy_config(ROOT / "deployments" / "small-and-large-gpu.yaml").app
    assert (ours.target, ours.draft, ours.speculation) == (other.target, other.draft, other.speculation)


def test_open_ports_ask_for_keys_that_are_mounted(serve_config, groups):
    config = parse_deploy_config(serve_config)
    assert (config.schema.http_options.host, config.app.gateway.grpc_host) == ("0.0.0.0", "0.0.0.0")
    keys = Path(config.app.gateway.api_keys_file)
    (mount,) = container(groups["head"])["volumeMounts"]
    assert mount["mountPath"] == str(keys.parent)
    assert mount["readOnly"]
    (volume,) = groups["head"]["template"]["spec"]["volumes"]
    assert volume["name"] == mount["name"]
    comment = (ROOT / "deployments" / "kuberay.yaml").read_text(encoding="utf-8")
    assert f"secret generic {volume['secret']['secretName']} --from-file={keys.name}=" in comment


def test_every_deployment_asks_for_the_label_of_one_group_and_fits_its_pods(serve_config, groups):
    (application,) = parse_deploy_config(serve_config).schema.applications
    pools = {item.name: item.ray_actor_options.label_selector["pool"] for item in application.deployments}
    assert pools == {
        "Gateway": "head",
        "Coordinator": "head",
        "DraftWorker": "draft",
        "TargetWorker": "target",
    }
    assert set(groups) == set(pools.values())
    for pool, group in groups.items():
        limits = container(group)["resources"]["limits"]
        options = [item.ray_actor_options for item in application.deployments if pools[item.name] == pool]
        assert sum(option.num_cpus for option in options) <= int(limits["cpu"])
        gpus = sum(option.num_gpus for option in options if "num_gpus" in option.model_fields_set)
        assert gpus == int(limits.get("nvidia.com/gpu", 0))


def test_start_parameters_leave_labels_and_resources_to_the_groups(groups):
    for group in groups.values():
        assert group["rayStartParams"] == {}


def test_draft_and_target_scale_apart_on_gpus_of_their_own(spec, groups):
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"]
    workers = [groups["draft"], groups["target"]]
    assert all(group["minReplicas"] <= group["replicas"] < group["maxReplicas"] for group in workers)
    assert len({str(group["template"]["spec"]["nodeSelector"]) for group in workers}) == 2
    assert len({group["groupName"] for group in workers}) == 2


def test_rays_token_is_asked_for_and_its_version_is_ours(spec):
    cluster = spec["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == "2.60.0"
    text = (ROOT / "deployments" / "kuberay.yaml").read_text(encoding="utf-8")
    assert f"rayproject/ray:{cluster['rayVersion']}" in text


def test_every_pod_has_the_same_image_serves_settings_and_both_probes(groups):
    containers = [container(group) for group in groups.values()]
    assert len({item["image"] for item in containers}) == 1
    for item in containers:
        environment = {entry["name"]: entry["value"] for entry in item["env"]}
        assert environment == SERVE_ENVIRONMENT
        assert item["resources"]["limits"] == item["resources"]["requests"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert "local_raylet_healthz" in item[probe]["exec"]["command"][-1]


def test_a_worker_pod_takes_http_only_while_its_proxy_answers(serve_config, groups):
    config = parse_deploy_config(serve_config).schema
    assert config.proxy_location == "EveryNode"
    for pool in ("draft", "target"):
        command = container(groups[pool])["readinessProbe"]["exec"]["command"][-1]
        assert f"localhost:{config.http_options.port}/-/healthz" in command


def test_the_grpc_service_leads_to_the_pods_of_the_gateways(documents, serve_config, groups):
    service = documents[1]["spec"]
    assert service["selector"].items() <= groups["head"]["template"]["metadata"]["labels"].items()
    (port,) = service["ports"]
    ports = {item["name"]: item["containerPort"] for item in container(groups["head"])["ports"]}
    assert (
        port["port"] == ports[port["targetPort"]] == parse_deploy_config(serve_config).app.gateway.grpc_port
    )


def test_workers_scale_by_themselves_up_to_their_groups(serve_config, groups):
    (application,) = parse_deploy_config(serve_config).schema.applications
    for item in application.deployments:
        group = groups[item.ray_actor_options.label_selector["pool"]]
        if item.name in ("DraftWorker", "TargetWorker"):
            bounds = item.autoscaling_config
            assert (bounds["min_replicas"], bounds["max_replicas"]) == (
                group["minReplicas"],
                group["maxReplicas"],
            )
