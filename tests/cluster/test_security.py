"""What guards shipped deployments: Ray's token, the dashboard on loopback, keys where a door is open."""

import subprocess
from pathlib import Path

import pytest
import yaml

from specdec.cluster.deploy_config import default_deploy_config, load_deploy_config, parse_deploy_config
from specdec.cluster.exposure import check_certificates, exposures
from specdec.errors import ConfigError

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "cluster.yaml", *sorted((ROOT / "deployments").glob("*.yaml"))]


def documents(path):
    return [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]


def kind_of(path):
    first = documents(path)[0]
    if "provider" in first:
        return "cluster"
    return "kubernetes" if first.get("kind") == "RayService" else "serve"


CLUSTER_FILES = [path for path in FILES if kind_of(path) == "cluster"]
KUBERNETES_FILES = [path for path in FILES if kind_of(path) == "kubernetes"]
SERVE_FILES = [path for path in FILES if kind_of(path) == "serve"]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def test_every_kind_of_file_is_looked_at():
    assert {path.name for path in CLUSTER_FILES} == {"cluster.yaml", "onprem-cluster.yaml"}
    assert [path.name for path in KUBERNETES_FILES] == ["kuberay.yaml"]
    assert len(SERVE_FILES) >= 4


@named(CLUSTER_FILES)
def test_ray_asks_for_its_token_on_every_node_and_shows_its_dashboard_to_the_head_alone(path):
    (cluster,) = documents(path)
    starts = [
        command
        for role in ("head", "worker")
        for command in cluster[f"{role}_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        before, _, after = command.partition("ray start")
        assert "export RAY_AUTH_MODE=token" in before
        assert "--dashboard-host=127.0.0.1" in after or "--head" not in after
    (remote,) = [target for target in cluster["file_mounts"] if target.endswith("/.ray/auth_token")]
    assert f"chmod 600 {remote}" in cluster["initialization_commands"]


@named(KUBERNETES_FILES)
def test_kuberay_hands_rays_token_to_every_pod_and_the_open_doors_ask_for_keys(path):
    spec = documents(path)[0]["spec"]
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    config = parse_deploy_config(yaml.safe_load(spec["serveConfigV2"]))
    warnings = list(exposures(config.schema.http_options, config.app.gateway))
    assert [text for text in warnings if "API keys" in text] == []


@named(SERVE_FILES)
def test_a_shipped_deployment_is_reached_from_its_own_machine_alone(path):
    config = load_deploy_config(path)
    assert list(exposures(config.schema.http_options, config.app.gateway)) == []


def warnings_of(overrides, monkeypatch, environment_keys=None):
    monkeypatch.delenv("SPECDEC_API_KEYS", raising=False)
    if environment_keys is not None:
        monkeypatch.setenv("SPECDEC_API_KEYS", environment_keys)
    config = default_deploy_config(overrides)
    return list(exposures(config.schema.http_options, config.app.gateway))


OPEN = {"http_options.host": "0.0.0.0", "args.gateway.grpc_host": "::"}
TLS = {
    "http_options.ssl_certfile": "/c",
    "http_options.ssl_keyfile": "/k",
    "args.gateway.grpc_tls_cert": "/c",
    "args.gateway.grpc_tls_key": "/k",
}
KEYS = {"args.gateway.api_keys_file": "/keys"}


def test_each_open_door_is_warned_of_by_what_it_lacks(monkeypatch):
    lacking = warnings_of(OPEN, monkeypatch)
    assert [text.split(" is ")[0] for text in lacking] == ["HTTP", "HTTP", "gRPC", "gRPC"]
    assert all("without TLS" in text for text in warnings_of(OPEN | KEYS, monkeypatch))
    assert len(warnings_of(OPEN | KEYS, monkeypatch)) == 2
    assert warnings_of(OPEN, monkeypatch, "sk-1") == warnings_of(OPEN | KEYS, monkeypatch)
    assert len(warnings_of(OPEN | TLS, monkeypatch)) == 2
    assert warnings_of(OPEN | TLS | KEYS, monkeypatch) == []
    assert warnings_of({"http_options.host": "localhost"}, monkeypatch) == []
    assert len(warnings_of({"http_options.host": "my-host"}, monkeypatch)) == 2


@pytest.fixture
def certificate(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    subprocess.run([*make.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return str(cert), str(key)


@pytest.mark.parametrize("door", ["http_options.ssl_{}file", "args.gateway.grpc_tls_{}"])
def test_certificates_are_tried_before_anything_starts(door, certificate, tmp_path):
    def config(cert, key):
        return default_deploy_config({door.format("cert"): cert, door.format("key"): key})

    cert, key = certificate
    check_certificates(config(cert, key))
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("nothing")
    for bad in ((cert, str(tmp_path / "absent")), (str(no_pem), key), (key, cert)):
        with pytest.raises(ConfigError, match="cannot use"):
            check_certificates(config(*bad))


@pytest.mark.parametrize("key", ["http_options.ssl_certfile", "http_options.ssl_keyfile"])
def test_half_a_pair_of_tls_files_is_not_taken_for_no_tls(key):
    with pytest.raises(ConfigError, match="go together"):
        default_deploy_config({key: "/some/file"})
