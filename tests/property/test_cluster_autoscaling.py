"""The autoscaling policy is bounded, rises with the load, and stays where it is once it is right."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from specdec.cluster.autoscaling import AutoscalingSettings, Load, Replicas, wanted_drafts, wanted_targets

amounts = st.floats(0, 1e4, allow_nan=False)
settings_ = st.builds(
    AutoscalingSettings,
    sequences_per_target=st.floats(0.5, 64),
    kv_high_water=st.floats(0.1, 1),
    max_waiting=st.floats(0, 20),
    max_round_s=st.none() | st.floats(0.001, 1),
    sequences_per_draft=st.floats(0.5, 128),
    max_draft_share=st.floats(0.05, 1),
    drafts_per_target=st.floats(0.1, 3),
    spare=st.floats(0, 0.9),
)
loads = st.builds(
    Load,
    num_targets=st.integers(0, 12),
    num_drafts=st.integers(0, 12),
    num_running=amounts,
    num_waiting=amounts,
    kv_tokens=amounts,
    kv_capacity_tokens=st.just(0.0) | st.floats(1, 1e4),
    draft_kv_tokens=amounts,
    draft_kv_capacity_tokens=st.just(0.0) | st.floats(1, 1e4),
    round_s=st.floats(0, 2),
    draft_share=st.floats(0, 1),
)
replicas_ = st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 15)).map(
    lambda drawn: Replicas(min_replicas=drawn[0], max_replicas=max(drawn[0] + drawn[1], 1), current=drawn[2])
)
RISING = ("num_running", "num_waiting", "kv_tokens", "draft_kv_tokens", "round_s", "draft_share")


@given(loads, settings_, replicas_, st.integers(0, 12))
def test_within_bounds_and_never_more_drafts_than_the_ratio(load, settings, replicas, num_targets):
    assert replicas.min_replicas <= wanted_targets(load, settings, replicas) <= replicas.max_replicas
    drafts = wanted_drafts(load, settings, replicas, num_targets)
    assert replicas.min_replicas <= drafts <= replicas.max_replicas
    ratio = max(num_targets * settings.drafts_per_target + 1e-6, 1)
    assert drafts <= max(ratio, replicas.min_replicas)


@given(loads, settings_, replicas_, st.sampled_from(RISING), st.floats(0, 1e3), st.integers(0, 12))
def test_more_load_never_wants_fewer(load, settings, replicas, name, more, num_targets):
    heavier = replace(load, **{name: getattr(load, name) + more})
    assert wanted_targets(heavier, settings, replicas) >= wanted_targets(load, settings, replicas)
    assert wanted_drafts(heavier, settings, replicas, num_targets) >= wanted_drafts(
        load, settings, replicas, num_targets
    )


@given(loads, settings_, replicas_, st.integers(0, 12))
def test_what_was_followed_is_wanted_again(load, settings, replicas, num_targets):
    targets = replace(replicas, current=wanted_targets(load, settings, replicas))
    assert wanted_targets(load, settings, targets) == targets.current
    drafts = replace(replicas, current=wanted_drafts(load, settings, replicas, num_targets))
    assert wanted_drafts(load, settings, drafts, num_targets) == drafts.current


@given(loads, settings_, replicas_, st.floats(0.0, 1.0), st.lists(st.floats(0.0, 1.0), max_size=20))
def test_a_load_that_wavers_by_less_than_what_is_spared_moves_nothing(
    load, settings, replicas, share, wavering
):
    """Once the peak has been followed, nothing below it but above the spared part makes a target go."""
    load = replace(load, num_waiting=0.0)  # its step has no width
    # From few to as many as it takes: more than that would be kept for an earlier, higher peak only.
    few = replace(replicas, current=replicas.min_replicas)
    following = replace(replicas, current=wanted_targets(load, settings, few))
    for part in wavering:
        factor = 1 - part * settings.spare * share
        lower = replace(
            load,
            num_running=load.num_running * factor,
            kv_tokens=load.kv_tokens * factor,
            round_s=load.round_s * factor,
        )
        assert wanted_targets(lower, settings, following) == following.current


@given(settings_, st.integers(0, 5), st.integers(0, 12), st.integers(0, 12), st.integers(0, 15))
def test_idle_wants_the_least(settings, least, num_targets, num_drafts, current):
    idle = Load(num_targets=num_targets, num_drafts=num_drafts, round_s=0.5, draft_share=0.9)
    replicas = Replicas(min_replicas=least, max_replicas=20, current=current)
    assert wanted_targets(idle, settings, replicas) == least
    assert wanted_drafts(idle, settings, replicas, num_targets) == least


def test_every_amount_of_a_load_is_tried():
    known = {*RISING, "num_targets", "num_drafts", "kv_capacity_tokens", "draft_kv_capacity_tokens"}
    assert {field.name for field in fields(Load)} == known
