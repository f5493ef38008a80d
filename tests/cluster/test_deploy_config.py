"""Deployment files are checked in full, with no cluster running."""

import copy

import pytest

from specdec.cluster.autoscaling_policy import POLICY_PATH
from specdec.cluster.deploy_checks import DEPLOYMENT_NAMES
from specdec.cluster.deploy_config import load_deploy_config, parse_deploy_config
from specdec.cluster.deploy_overrides import apply_overrides, parse_settings
from specdec.cluster.deploy_tree import APP_IMPORT_PATH
from specdec.errors import ConfigError

FILE = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "specdec",
            "import_path": APP_IMPORT_PATH,
            "args": {"target": {"model": "smollm2"}, "draft": {"model": "smollm2-draft"}},
            "deployments": [
                {"name": name, "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
                for name in DEPLOYMENT_NAMES
            ],
        }
    ],
}


@pytest.fixture
def values():
    return copy.deepcopy(FILE)


def deployment(values, name):
    return next(item for item in values["applications"][0]["deployments"] if item["name"] == name)


def test_a_correct_file_gives_serves_schema_and_the_typed_args(values):
    config = parse_deploy_config(values)
    assert config.schema.http_options.port == 8000
    assert [item.name for item in config.schema.applications[0].deployments] == list(DEPLOYMENT_NAMES)
    assert config.schema.applications[0].args == values["applications"][0]["args"]
    assert config.app.draft.model == "smollm2-draft"


def test_the_tree_given_is_left_as_it_is(values):
    parse_deploy_config(values, {"args.draft": None, "grpc_options.port": 1234})
    assert values == FILE


@pytest.mark.parametrize(
    ("section", "key", "path", "hint"),
    [
        (lambda v: v, "http_option", "http_option", "http_options"),
        (lambda v: v["http_options"], "prot", "http_options.prot", "port"),
        (lambda v: v["applications"][0], "arg", "applications[specdec].arg", "args"),
        (
            lambda v: deployment(v, "DraftWorker"),
            "num_replicaz",
            "applications[specdec].deployments[DraftWorker].num_replicaz",
            "num_replicas",
        ),
        (
            lambda v: deployment(v, "TargetWorker")["ray_actor_options"],
            "num_gpu",
            "applications[specdec].deployments[TargetWorker].ray_actor_options.num_gpu",
            "num_gpus",
        ),
        (
            lambda v: deployment(v, "Gateway").setdefault("autoscaling_config", {}),
            "max_replica",
            "applications[specdec].deployments[Gateway].autoscaling_config.max_replica",
            "max_replicas",
        ),
        (
            lambda v: v["applications"][0]["args"]["target"],
            "modle",
            "applications[specdec].args.target.modle",
            "model",
        ),
        (
            lambda v: v["applications"][0]["args"],
            "speculatoin",
            "applications[specdec].args.speculatoin",
            "speculation",
        ),
    ],
)
def test_a_misspelt_key_is_refused_with_its_path_and_the_closest_match(values, section, key, path, hint):
    section(values)[key] = 1
    with pytest.raises(ConfigError) as caught:
        parse_deploy_config(values)
    message = str(caught.value)
    assert f"- {path}: unknown key; did you mean {hint}? (allowed: " in message
    assert message.count("unknown key") == 1


def test_all_unknown_keys_are_named_at_once(values):
    values["a_key"] = values["http_options"]["b_key"] = values["applications"][0]["args"]["c_key"] = 1
    with pytest.raises(ConfigError, match="unknown key") as caught:
        parse_deploy_config(values)
    assert all(key in str(caught.value) for key in ("a_key", "b_key", "c_key"))


def test_free_form_sections_may_hold_any_key(values):
    options = deployment(values, "DraftWorker")["ray_actor_options"]
    options |= {"resources": {"draft_gpu": 1}, "label_selector": {"pool": "draft"}, "runtime_env": {}}
    values["applications"][0]["runtime_env"] = {"env_vars": {"ANY": "thing"}}
    parse_deploy_config(values)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"args.target.dtype": "int3"}, r"args: .*target\.dtype: .*'bfloat16'.*int3"),
        ({"args": None}, "args: "),
        ({"http_options.port": "many"}, r"- http_options\.port: .*valid integer"),
        ({"http_options": None}, "- http_options: "),
        ({"proxy_location": "Nowhere"}, "- proxy_location: "),
    ],
)
def test_a_bad_value_is_refused_with_its_path(values, overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse_deploy_config(values, overrides)


def test_a_bad_deployment_setting_is_refused_under_the_deployments_name(values):
    deployment(values, "Coordinator")["max_ongoing_requests"] = -1
    with pytest.raises(ConfigError, match=r"deployments\[Coordinator\]\.max_ongoing_requests: "):
        parse_deploy_config(values)


@pytest.mark.parametrize(
    ("deployments", "message"),
    [
        ([{"name": "DraftWorkers"}], "unknown deployment DraftWorkers; did you mean DraftWorker?"),
        ([{"name": "Gateway"}, {"name": "Gateway"}], "Gateway is listed twice"),
        (["Gateway"], r"deployments\[0\]: must be a mapping with a name"),
        ([{"num_replicas": 2}], r"deployments\[0\]: must be a mapping with a name"),
        ({"Gateway": {}}, "deployments: must be a list"),
        (None, "deployments: must be a list"),
    ],
)
def test_deployments_must_be_distinct_and_known(values, deployments, message):
    values["applications"][0]["deployments"] = deployments
    with pytest.raises(ConfigError, match=message):
        parse_deploy_config(values)


@pytest.mark.parametrize("values", [None, [], "text", {}, {"applications": None}, {"applications": []}])
def test_what_is_no_deployment_file_is_refused(values):
    with pytest.raises(ConfigError, match="applications"):
        parse_deploy_config(values)


def test_another_application_is_refused(values):
    values["applications"][0]["import_path"] = "other.module:app"
    with pytest.raises(ConfigError, match=r"import_path must be 'specdec\..*got 'other\.module:app'"):
        parse_deploy_config(values)


def test_serves_own_grpc_proxy_is_refused(values):
    with pytest.raises(ConfigError, match=r"grpc_servicer_functions: must be empty"):
        parse_deploy_config(values, {"grpc_options.grpc_servicer_functions": ["some.module:add_to_server"]})


def test_an_absent_http_host_means_loopback(values):
    del values["http_options"]
    assert parse_deploy_config(values).schema.http_options.host == "127.0.0.1"


def test_without_a_draft_model_the_draft_worker_is_left_out(values):
    config = parse_deploy_config(values, {"args.draft": None})
    names = [item.name for item in config.schema.applications[0].deployments]
    assert names == ["Gateway", "Coordinator", "TargetWorker"]
    assert config.app.draft is None


def test_overrides_reach_into_args_and_top_level_sections(values):
    config = parse_deploy_config(
        values,
        {
            "args.target.model": "other",
            "args.speculation.num_speculative_tokens": 5,
            "http_options.port": 8001,
            "args.gateway.grpc_port": 9001,
        },
    )
    assert config.app.target.model == "other"
    assert config.app.speculation.num_speculative_tokens == 5
    assert config.app.gateway.grpc_port == 9001
    assert config.schema.http_options.port == 8001
    assert config.schema.applications[0].args["target"] == {"model": "other"}


def test_an_override_creates_sections_that_are_null(values):
    values["applications"][0]["args"]["draft"] = None
    assert parse_deploy_config(values, {"args.draft.model": "tiny"}).app.draft.model == "tiny"


def test_a_misspelt_override_is_refused_like_a_misspelt_key(values):
    with pytest.raises(ConfigError, match="did you mean http_options"):
        parse_deploy_config(values, {"http_option.port": 1})


def test_an_override_through_a_plain_value_is_refused(values):
    with pytest.raises(ConfigError, match=r"cannot set args\.target\.model\.name: model is 'smollm2'"):
        apply_overrides(values, {"args.target.model.name": "x"})


def test_load_names_the_file_in_every_error(tmp_path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml: No such file"):
        load_deploy_config(missing)
    broken = tmp_path / "broken.yaml"
    broken.write_text("applications: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not valid YAML: .*"):
        load_deploy_config(broken)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.yaml: "):
        load_deploy_config(empty)


def test_settings_are_overrides_with_yaml_values():
    settings = [
        "args.speculation.pipeline=serial",
        "args.draft=null",
        "http_options.port=8001",
        "a.b=[1, x=y]",
    ]
    assert parse_settings(settings) == {
        "args.speculation.pipeline": "serial",
        "args.draft": None,
        "http_options.port": 8001,
        "a.b": [1, "x=y"],
    }


@pytest.mark.parametrize("setting", ["args.dtype", "=3", "args..x=3", "a=[1"])
def test_what_is_no_setting_is_refused(setting):
    with pytest.raises(ConfigError, match="--set"):
        parse_settings([setting])


# Autoscaling

BOUNDS = {"min_replicas": 1, "max_replicas": 4}
ONE = {"min_replicas": 1, "max_replicas": 1}


@pytest.fixture
def scaling_values(values):
    (application,) = values["applications"]
    application["autoscaling_policy"] = {
        "policy_function": POLICY_PATH,
        "policy_kwargs": {"sequences_per_target": 8},
    }
    for name, bounds in (("Coordinator", ONE), ("DraftWorker", BOUNDS), ("TargetWorker", BOUNDS)):
        item = deployment(values, name)
        del item["num_replicas"]
        item["autoscaling_config"] = dict(bounds)
    return values


def policy(values):
    return values["applications"][0]["autoscaling_policy"]


def test_a_correct_autoscaled_file_is_taken_also_without_a_draft(scaling_values):
    application = parse_deploy_config(scaling_values).schema.applications[0]
    assert application.autoscaling_policy["policy_kwargs"] == {"sequences_per_target": 8}
    parse_deploy_config(scaling_values, {"args.draft": None})


WRONG_SCALING = [
    (
        lambda v: v["applications"][0].pop("autoscaling_policy"),
        r"deployments\[TargetWorker\] scales by itself only",
    ),
    (lambda v: policy(v).update(policy_function="m:p"), "policy_function must be 'specdec.cluster"),
    (lambda v: policy(v)["policy_kwargs"].update(sequences_per_drafts=1), "did you mean sequences_per_draft"),
    (lambda v: policy(v)["policy_kwargs"].update(spare=1.5), "policy_kwargs: spare: Input should be less"),
    (lambda v: policy(v)["policy_kwargs"].update(sequences_per_target=33), "no more than 32 sequences"),
    (
        lambda v: deployment(v, "Coordinator").pop("autoscaling_config"),
        r"\[Coordinator\].autoscaling_config is needed",
    ),
    (
        lambda v: deployment(v, "TargetWorker").pop("autoscaling_config"),
        r"\[TargetWorker\].autoscaling_config is",
    ),
    (
        lambda v: deployment(v, "Coordinator").update(autoscaling_config=BOUNDS),
        r"\[Coordinator\] does not scale",
    ),
    (
        lambda v: deployment(v, "Gateway").update(num_replicas="auto"),
        r"\[Gateway\]: write autoscaling_config",
    ),
    (
        lambda v: deployment(v, "DraftWorker")["autoscaling_config"].update(max_replica=2),
        "did you mean max_replicas",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG_SCALING)
def test_what_would_not_scale_as_it_seems_is_refused(scaling_values, change, message):
    change(scaling_values)
    with pytest.raises(ConfigError, match=message):
        parse_deploy_config(scaling_values)
