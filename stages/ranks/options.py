"""How ranks wait for each other."""

from __future__ import annotations

import math

import attrs

from streamflow.stages.ranks.errors import WaveOptionsError

#: A rank with nothing to say speaks once in so many heartbeats.
IDLE_HEARTBEATS = 5
#: A rank counts as lost well before the others would take the coordinating rank, which waits for it, to be lost, too.
LOST_AFTER = 0.75


def _is_time(options: WaveOptions, field: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise WaveOptionsError(field.name, value, "has to be a number of seconds")


@attrs.frozen(kw_only=True)
class WaveOptions:
    """When waves begin, and how long ranks and requests wait. Equal on all ranks.

    ``max_passes``: requests of one rank in one wave. ``window_s``: how long the oldest waiting request waits for others
    to walk with. ``deadline_s``: how long a request waits for a wave. ``rank_deadline_s``: within it, all ranks know of
    one that is dead or silent; one is lost that says nothing for three quarters of it. ``heartbeat_s``: how often ranks
    speak while requests wait; else five times as long. ``member_deadline_s``: how long a wave waits for a member whose
    own code does not go on (None: for ever). ``needs_all_ranks``: a request is every rank's, which give it to
    their models in the same order: a wave has as many members on each, so that nobody waits in a model's own collective
    for a rank that only feeds.

    :raises WaveOptionsError: if a time is none, if ``max_passes`` is not 1 or more, if ``rank_deadline_s`` is under ten
        heartbeats, or ``deadline_s`` under ``window_s``.
    """

    max_passes: int
    window_s: float = attrs.field(default=0.5, validator=_is_time)
    deadline_s: float = attrs.field(default=60.0, validator=_is_time)
    rank_deadline_s: float = attrs.field(default=10.0, validator=_is_time)
    heartbeat_s: float = attrs.field(default=0.05, validator=_is_time)
    member_deadline_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(_is_time))
    needs_all_ranks: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.max_passes, bool) or not isinstance(self.max_passes, int) or self.max_passes < 1:
            raise WaveOptionsError("max_passes", self.max_passes, "has to be 1 or more")
        if self.heartbeat_s == 0:
            raise WaveOptionsError("heartbeat_s", self.heartbeat_s, "has to be more than 0")
        if self.deadline_s < self.window_s:
            raise WaveOptionsError("deadline_s", self.deadline_s, f"has to be at least window_s={self.window_s:g}")
        if self.rank_deadline_s < 2 * self.idle_heartbeat_s:
            raise WaveOptionsError(
                "rank_deadline_s",
                self.rank_deadline_s,
                f"has to be at least {2 * self.idle_heartbeat_s:g}: 10 heartbeats",
            )

    @property
    def idle_heartbeat_s(self) -> float:
        """How often ranks speak while there is nothing to say."""
        return IDLE_HEARTBEATS * self.heartbeat_s

    @property
    def let_go_after_s(self) -> float | None:
        """How long a rank waits for a member of its own that does not come to the next walk, until it goes on without.

        None: for ever. Where ranks share each request, none may be left behind: the others' would wait for it.
        """
        return None if self.needs_all_ranks else self.member_deadline_s

    @property
    def lost_after_s(self) -> float:
        """How long the coordinating rank waits for another one."""
        return LOST_AFTER * self.rank_deadline_s
