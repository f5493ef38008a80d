"""`specdec serve`: its flags as settings of a deployment file."""

from pathlib import Path

import pytest

from specdec.cli import _tls_overrides
from specdec.errors import ConfigError


def test_one_pair_of_files_secures_both_doors_whatever_folder_a_process_is_in(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _tls_overrides(None, None) == {}
    assert _tls_overrides(Path("cert.pem"), Path("/etc/key.pem")) == {
        "http_options.ssl_certfile": str(tmp_path / "cert.pem"),
        "http_options.ssl_keyfile": "/etc/key.pem",
        "args.gateway.grpc_tls_cert": str(tmp_path / "cert.pem"),
        "args.gateway.grpc_tls_key": "/etc/key.pem",
    }


@pytest.mark.parametrize("pair", [(Path("c"), None), (None, Path("k"))])
def test_half_a_pair_is_refused(pair):
    with pytest.raises(ConfigError, match="go together"):
        _tls_overrides(*pair)
