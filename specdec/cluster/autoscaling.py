"""How many draft and target workers a load wants. Pure: `specdec.cluster.autoscaling_policy` asks for Serve.

Serve's delays (``upscale_delay_s``, ``downscale_delay_s``) decide for how long an answer must stand before it
is followed; here, what a removal would leave must hold the load with some room to spare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.errors import ConfigError

ROUNDING = 1e-9
"""A load that is exactly what N workers bear does not want N + 1 for the last bit of a float."""


class AutoscalingSettings(BaseModel):
    """``autoscaling_policy.policy_kwargs`` of a deployment file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences_per_target: float = Field(default=24.0, gt=0)
    """Sequences of one target, running and waiting, that are enough for it."""
    kv_high_water: float = Field(default=0.8, gt=0, le=1)
    """Share of a worker's KV cache that may be promised to sequences."""
    max_waiting: float = Field(default=0.0, ge=0)
    """With more sequences waiting another target is wanted, whatever else is measured."""
    max_round_s: float | None = Field(default=None, gt=0)
    """Seconds of a round, of the slowest lane, that are still fast enough; None: any."""
    sequences_per_draft: float = Field(default=48.0, gt=0)
    """Sequences of one draft that are enough for it."""
    max_draft_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a round, of the lane where it is largest, that may pass until the drafts are there."""
    drafts_per_target: float = Field(default=1.0, gt=0)
    """Never more drafts than this for each target, but for ``min_replicas``; 0.5: one for two."""
    spare: float = Field(default=0.2, ge=0, lt=1)
    """A worker goes only where the others would stay this far below their limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What workers and coordinators report, in all."""

    num_targets: int
    """That run."""
    num_drafts: int
    num_running: float = 0.0
    """Sequences that have a place in a lane."""
    num_waiting: float = 0.0
    kv_tokens: float = 0.0
    """KV cache of targets that is used by sequences or promised to them, waiting ones included."""
    kv_capacity_tokens: float = 0.0
    """Of one target; 0 while none has said."""
    draft_kv_tokens: float = 0.0
    """KV cache of drafts in use."""
    draft_kv_capacity_tokens: float = 0.0
    """Of one draft."""
    round_s: float = 0.0
    """Of the slowest lane; 0 while none decodes."""
    draft_share: float = 0.0
    """Of the lane where it is largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """What a deployment may have, and what it was told to have last."""

    min_replicas: int
    max_replicas: int
    current: int

    def bounded(self, wanted: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, wanted))


def parse_settings(values: object) -> AutoscalingSettings:
    """Check ``policy_kwargs``.

    Raises:
        ConfigError: naming each key at fault.
    """
    try:
        return AutoscalingSettings.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'policy_kwargs'}: {item['msg']}" for item in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from error


def wanted_targets(load: Load, settings: AutoscalingSettings, replicas: Replicas) -> int:
    """Targets that the load wants, within their bounds."""
    enough = _targets_for(load, settings, room=1.0)
    to_spare = _targets_for(load, settings, room=1.0 - settings.spare)
    return replicas.bounded(max(enough, min(replicas.current, to_spare)))


def wanted_drafts(load: Load, settings: AutoscalingSettings, replicas: Replicas, num_targets: int) -> int:
    """Drafts that the load wants beside so many targets, within their bounds."""
    enough = _drafts_for(load, settings, room=1.0)
    to_spare = _drafts_for(load, settings, room=1.0 - settings.spare)
    most = max(math.floor(num_targets * settings.drafts_per_target + ROUNDING), 1)
    return replicas.bounded(min(most, max(enough, min(replicas.current, to_spare))))


def _targets_for(load: Load, settings: AutoscalingSettings, room: float) -> int:
    """Targets whose limits, times ``room``, the load stays within."""
    wanted = [
        (load.num_running + load.num_waiting) / (settings.sequences_per_target * room),
        _ratio(load.kv_tokens, load.kv_capacity_tokens * settings.kv_high_water * room),
    ]
    if settings.max_round_s is not None:
        # As if a round took in proportion to its sequences; alone, a sequence is as fast as it gets.
        rounds = load.num_targets * load.round_s / (settings.max_round_s * room)
        wanted.append(min(rounds, load.num_running))
    if load.num_waiting > settings.max_waiting:
        wanted.append(load.num_targets + 1)
    return _ceil(max(wanted))


def _drafts_for(load: Load, settings: AutoscalingSettings, room: float) -> int:
    """The same for drafts."""
    # Drafts share the sequences out among them: no more of the round's time can be saved than they have.
    by_share = load.num_drafts * load.draft_share / (settings.max_draft_share * room)
    return _ceil(
        max(
            (load.num_running + load.num_waiting) / (settings.sequences_per_draft * room),
            _ratio(load.draft_kv_tokens, load.draft_kv_capacity_tokens * settings.kv_high_water * room),
            min(by_share, load.num_running),
        )
    )


def _ratio(amount: float, capacity: float) -> float:
    return amount / capacity if capacity > 0 else 0.0


def _ceil(value: float) -> int:
    return math.ceil(value - ROUNDING)
