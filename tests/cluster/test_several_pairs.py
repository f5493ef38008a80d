"""Deployment files with several pairs, and what `specdec scale` makes of them."""

from __future__ import annotations

import copy

import pytest

from specdec.cluster.app import build_pair
from specdec.cluster.autoscaling_policy import POLICY_PATH
from specdec.cluster.deploy_config import parse_deploy_config
from specdec.cluster.deploy_tree import APP_IMPORT_PATH, PAIR_IMPORT_PATH
from specdec.cluster.scaling import scaled
from specdec.errors import ConfigError

FIRST = {
    "name": "specdec",
    "route_prefix": "/",
    "import_path": APP_IMPORT_PATH,
    "args": {
        "target": {"model": "smollm2"},
        "draft": {"model": "smollm2-draft"},
        "gateway": {"grpc_port": 9001, "other_pairs": ["large", "plain"]},
    },
}
LARGE = {
    "name": "large",
    "route_prefix": None,
    "import_path": PAIR_IMPORT_PATH,
    "args": {
        "target": {"model": "big/target"},
        "draft": {"model": "big/draft"},
        "gateway": {"tool_parser": "hermes"},
    },
    "deployments": [{"name": "DraftWorker", "num_replicas": 2}],
}
PLAIN = {
    "name": "plain",
    "route_prefix": None,
    "import_path": PAIR_IMPORT_PATH,
    "args": {"target": {"model": "smollm2"}, "served_model_name": "plain"},
    "deployments": [{"name": "DraftWorker", "num_replicas": 2}, {"name": "TargetWorker", "num_replicas": 3}],
}


@pytest.fixture
def values():
    return copy.deepcopy({"applications": [FIRST, LARGE, PLAIN]})


def args_of(config, name):
    return next(item for item in config.schema.applications if item.name == name).args


def deployments_of(schema, name):
    (application,) = [item for item in schema.applications if item.name == name]
    return {item.name: item.num_replicas for item in application.deployments}


def test_every_pair_is_typed_and_the_one_with_the_gateway_comes_first(values):
    values["applications"].reverse()
    config = parse_deploy_config(values)
    assert list(config.apps) == ["specdec", "plain", "large"]
    assert [app.model_name for app in config.apps.values()] == ["smollm2", "plain", "big/target"]
    assert config.app.gateway.grpc_port == 9001
    assert config.gateway_application.route_prefix == "/"
    assert config.other_pairs["large"].gateway.tool_parser == "hermes"
    # A DraftWorker that is not built may have no settings, in any application.
    assert deployments_of(config.schema, "plain") == {"TargetWorker": 3}
    assert deployments_of(config.schema, "large") == {"DraftWorker": 2}


def test_a_setting_is_the_first_pairs_unless_an_application_is_named(values):
    config = parse_deploy_config(
        values,
        {
            "args.target.dtype": "float32",
            "applications.large.args.target.dtype": "float16",
            "applications.plain.deployments": [],
        },
    )
    dtypes = [app.target.dtype for app in config.apps.values()]
    assert dtypes == ["float32", "float16", "bfloat16"]
    assert args_of(config, "large")["target"] == {"model": "big/target", "dtype": "float16"}
    assert deployments_of(config.schema, "plain") == {}


def test_a_setting_of_no_application_names_those_there_are(values):
    with pytest.raises(ConfigError, match=r"cannot set .*: the applications are large, plain, specdec"):
        parse_deploy_config(values, {"applications.larg.args.target.dtype": "float16"})


WRONG = [
    (
        lambda apps: apps[0]["args"]["gateway"].update(other_pairs=["large"]),
        r"applications\[specdec\]\.args\.gateway\.other_pairs: must list 'plain', or nobody serves",
    ),
    (
        lambda apps: apps[0]["args"]["gateway"].update(other_pairs=["large", "plain", "more"]),
        r"other_pairs: no application 'more' with import_path 'specdec\.cluster\.app:build_pair'",
    ),
    (
        lambda apps: apps[0]["args"]["gateway"].update(other_pairs=["large", "plain", "specdec"]),
        r"other_pairs: no application 'specdec' with import_path",
    ),
    (
        lambda apps: apps[0]["args"]["gateway"].update(other_pairs=["large", "plain", "large"]),
        r"other_pairs: 'large' is listed twice",
    ),
    (
        lambda apps: apps[2]["args"].pop("served_model_name"),
        r"applications\[plain\]\.args\.served_model_name: 'smollm2' is the name of applications\[specdec\]",
    ),
    (
        lambda apps: apps[1]["args"]["gateway"].update(grpc_port=1, tool_parser="auto", max_choices=2),
        r"applications\[large\]\.args: .*gateway\.grpc_port: belongs to the application that has the gateway",
    ),
    (
        lambda apps: apps[1]["args"]["gateway"].update(other_pairs=["plain"]),
        r"applications\[large\]\.args: .*gateway\.other_pairs: belongs to",
    ),
    (lambda apps: apps[1].pop("route_prefix"), r"applications\[large\]\.route_prefix: must be null"),
    (
        lambda apps: apps[1].update(route_prefix="/large"),
        r"applications\[large\]\.route_prefix: must be null",
    ),
    (
        lambda apps: apps[1]["deployments"].append({"name": "Gateway"}),
        r"applications\[large\]\.deployments\[1\]\.name: unknown deployment Gateway",
    ),
    (lambda apps: apps[1]["args"]["target"].update(modle=1), r"applications\[large\]\.args\.target\.modle"),
    (lambda apps: apps[1].update(nam="x"), r"applications\[large\]\.nam: unknown key; did you mean name"),
    (lambda apps: apps[0].update(import_path=PAIR_IMPORT_PATH), "exactly one with import_path '.*build_app'"),
    (lambda apps: apps[1].update(import_path=APP_IMPORT_PATH), "exactly one with import_path '.*build_app'"),
    (lambda apps: apps[1].update(import_path="m:x"), r"applications\[large\]\.import_path must be"),
    (lambda apps: apps[2].update(name="large"), "`applications`: 'large' is the name of 2 of them"),
    (
        lambda apps: apps[1]["deployments"][0].update(autoscaling_config={"max_replicas": 2}),
        r"\[large\]\.deployments\[DraftWorker\] scales by itself only with applications\[large\]\.",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_would_not_be_served_as_it_seems_is_refused(values, change, message):
    change(values["applications"])
    with pytest.raises(ConfigError, match=message):
        parse_deploy_config(values)


def test_a_pair_scales_by_its_own_policy(values):
    reports = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
    for application, spare in zip(values["applications"][:2], (0.1, 0.3), strict=True):
        application["autoscaling_policy"] = {
            "policy_function": POLICY_PATH,
            "policy_kwargs": {"spare": spare},
        }
        application["deployments"] = [{"name": name, **reports} for name in ("Coordinator", "TargetWorker")]
    applications = parse_deploy_config(values).schema.applications
    assert [item.autoscaling_policy["policy_kwargs"] for item in applications[:2]] == [
        {"spare": 0.1},
        {"spare": 0.3},
    ]
    assert applications[2].autoscaling_policy is None
    values["applications"][1]["autoscaling_policy"]["policy_kwargs"] = {"sequences_per_target": 33}
    with pytest.raises(ConfigError, match=r"applications\[large\]\.autoscaling_policy.*no more than 32"):
        parse_deploy_config(values)


def test_build_pair_refuses_what_the_gateway_owns_where_serve_deploys_the_file():
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file: belongs to the application that has"):
        build_pair({**LARGE["args"], "gateway": {"api_keys_file": "/k"}})


def test_a_pair_is_an_application_with_its_coordinator_in_front():
    assert build_pair(LARGE["args"])._bound_deployment.name == "Coordinator"


# Scaling


@pytest.fixture
def details(values):
    schema = parse_deploy_config(values).schema
    applications = schema.model_dump(mode="json", exclude_unset=True)["applications"]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {},
        "applications": {item["name"]: {"deployed_app_config": item} for item in applications},
    }


def test_one_application_is_scaled_and_the_others_stay_as_they_are(details):
    schema = scaled(details, {"TargetWorker": 2, "DraftWorker": 4}, "large")
    assert deployments_of(schema, "large") == {"TargetWorker": 2, "DraftWorker": 4}
    assert deployments_of(schema, "plain") == {"TargetWorker": 3}
    assert [item.route_prefix for item in schema.applications] == ["/", None, None]
    first = scaled(details, {"TargetWorker": 2})
    assert deployments_of(first, "specdec") == {"TargetWorker": 2}


@pytest.mark.parametrize(
    ("app", "counts", "message"),
    [
        ("larg", {"TargetWorker": 2}, r"--app 'larg': .* are 'specdec', 'large', 'plain'"),
        ("large", {"Gateway": 2}, "the application 'large' has no Gateway"),
        ("plain", {"DraftWorker": 2}, "without a draft"),
    ],
)
def test_what_an_application_has_not_cannot_be_scaled(details, app, counts, message):
    with pytest.raises(ConfigError, match=message):
        scaled(details, counts, app)
