"""Who can reach a deployment, and what stands between: told before it starts."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Iterator

from ray.serve.schema import HTTPOptionsSchema

from specdec.cluster.deploy_config import DeployConfig
from specdec.config import GatewayConfig
from specdec.errors import ConfigError
from specdec.gateway.keys import ENVIRONMENT_VARIABLE


def exposures(http: HTTPOptionsSchema, gateway: GatewayConfig) -> Iterator[str]:
    """Yield a warning for each door that is open to other machines without keys or without TLS."""
    has_keys = gateway.api_keys_file is not None or ENVIRONMENT_VARIABLE in os.environ
    for name, host, has_tls in (
        ("HTTP", http.host, bool(http.ssl_certfile)),
        ("gRPC", gateway.grpc_host, gateway.grpc_tls_cert is not None),
    ):
        if _is_loopback(host):
            continue
        if not has_keys:
            yield f"{name} is listening on {host} without API keys: anyone who reaches it may use it"
        if not has_tls:
            yield f"{name} is listening on {host} without TLS: keys and texts can be read on the way"


def check_certificates(config: DeployConfig) -> None:
    """Load certificate and key of each door as it will, on this machine.

    Raises:
        ConfigError: they cannot be read, are no PEM, or do not belong together.
    """
    http, gateway = config.schema.http_options, config.app.gateway
    for names, cert, key, password in (
        (
            "http_options.ssl_certfile/ssl_keyfile",
            http.ssl_certfile,
            http.ssl_keyfile,
            http.ssl_keyfile_password,
        ),
        ("gateway.grpc_tls_cert/grpc_tls_key", gateway.grpc_tls_cert, gateway.grpc_tls_key, None),
    ):
        if not (cert and key):
            continue
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                os.path.expanduser(cert), os.path.expanduser(key), password=password or ""
            )
        except OSError as error:  # ssl.SSLError is one
            reason = error.strerror or getattr(error, "reason", None) or "no PEM file"
            raise ConfigError(f"{names}: cannot use {cert} and {key}: {reason}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
