"""The host weight store among ranks: all stream from its entries, or none does."""

from __future__ import annotations

from streamflow.ranks.decisions import agree_on_store
from streamflow.ranks.opening import Ranks
from streamflow.stages.ranks.errors import RanksDisagreeError
from streamflow.store.reports import StoreReport


async def agreed_on_store(ranks: Ranks, component: str, report: StoreReport, *, uses_entry: bool) -> str | None:
    """Why no rank streams ``component`` from an entry of the store; None: all do. ``uses_entry``: this one would.

    :raises RanksDisagreeError: if the ranks have different weights, or the store failed one of them.
    :raises RankError: if a rank is gone.
    """
    decision = await agree_on_store(ranks.coordinator, component, report, uses_entry=uses_entry)
    if decision.action == "fail":
        raise RanksDisagreeError(f"what the store has for {component}: {decision.reason}", [report.content_id])
    return None if decision.action == "entry" else decision.reason
