"""Whether ranks gather, and why. Decided once at opening, on every rank from equal values, so to the same end."""

from __future__ import annotations

import attrs

from streamflow.errors import ConfigurationError
from streamflow.ranks.matrix import Parallelism, check_parallelism, gather_problems
from streamflow.ranks.options import Gather
from streamflow.ranks.topology import GatherGroup, RankGroups, gather_ranks


@attrs.frozen
class GatherChoice:
    """``group``: who gathers; None: every rank copies whole blocks. ``reason``: why."""

    group: GatherGroup | None
    reason: str


def choose_gathering(groups: RankGroups | None, parallelism: Parallelism, gather: Gather) -> GatherChoice:
    """Who gathers. ``groups``: what ``open_offload(ranks=...)`` was given; None: nothing.

    Whether they are on one node is not known here: see `streamflow.ranks.nodes.check_one_node`.

    :raises ConfigurationError: if ``gather`` is ``"always"`` and it cannot be, or the model cannot be streamed at all
        as it is spread; it lists every reason.
    """
    if gather == "always":
        check_parallelism(parallelism, gathered=True)
        if groups is None:
            raise ConfigurationError(
                ["ranks={'gather': 'always'} needs to know the ranks: pass open_offload(..., ranks=RankGroups(...))"]
            )
    group = None if groups is None else gather_ranks(groups)
    problems = gather_problems(parallelism)
    if group is not None and gather != "never" and not problems:
        return GatherChoice(group, f"{group.size} {group.axis.replace('_', '-')} ranks share the transfers")
    check_parallelism(parallelism, gathered=False)
    return GatherChoice(None, _why_not(group, gather, problems))


def _why_not(group: GatherGroup | None, gather: Gather, problems: list[str]) -> str:
    if group is None:
        return "no other rank has the same weights"
    return "gather='never' was asked for" if gather == "never" else "; ".join(problems)
