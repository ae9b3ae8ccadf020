"""What changed between two traces, ranked by the time that it makes. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from streamflow.tools.trace.analysis import ComponentReport
from streamflow.tools.trace.causes import CAUSES
from streamflow.tools.trace.report import CAUSE_NAMES


@attrs.frozen
class Change:
    """Seconds of a walk, on average, that went into ``what``, in each of the traces."""

    what: str
    before_s: float
    after_s: float

    @property
    def delta_s(self) -> float:
        return self.after_s - self.before_s


@attrs.frozen
class Fact:
    """Something else that is not the same: an option, a version, a size."""

    what: str
    before: Any
    after: Any


@attrs.frozen
class ComponentComparison:
    """One component in both traces. ``changes``: what makes walks longer or shorter, the most first."""

    name: str
    walk_before_s: float
    walk_after_s: float
    bound_before: str
    bound_after: str
    changes: list[Change]
    facts: list[Fact]


def compare(before: Sequence[ComponentReport], after: Sequence[ComponentReport]) -> list[ComponentComparison]:
    """The components that are in both, by name and rank; those without walks are left out."""
    others = {(report.name, report.rank): report for report in after}
    pairs = [(report, others.get((report.name, report.rank))) for report in before]
    return [_compare(one, other) for one, other in pairs if other is not None and one.walks and other.walks]


def _compare(before: ComponentReport, after: ComponentReport) -> ComponentComparison:
    changes = [Change("blocks run", _mean(before, "compute_s"), _mean(after, "compute_s"))]
    one, other = before.by_cause(), after.by_cause()
    for cause in CAUSES:
        changes.append(Change(CAUSE_NAMES[cause], one[cause] / len(before.walks), other[cause] / len(after.walks)))
    return ComponentComparison(
        name=before.title,
        walk_before_s=_mean(before, "seconds"),
        walk_after_s=_mean(after, "seconds"),
        bound_before=before.bound_by,
        bound_after=after.bound_by,
        changes=sorted((c for c in changes if c.delta_s), key=lambda change: -abs(change.delta_s)),
        facts=list(_facts(before, after)),
    )


def _mean(report: ComponentReport, name: str) -> float:
    return report.sum_of(name) / len(report.walks)


def _facts(before: ComponentReport, after: ComponentReport) -> Iterator[Fact]:
    values = {
        "bytes streamed in a walk": (_mean(before, "streamed_bytes"), _mean(after, "streamed_bytes")),
        "link rate in bytes per second": (before.link_bytes_per_s, after.link_bytes_per_s),
        "fetches on demand": (before.num_on_demand, after.num_on_demand),
        "worst answer of the loop in seconds": (before.worst_answer_s, after.worst_answer_s),
    }
    yield from (Fact(what, *pair) for what, pair in values.items() if pair[0] != pair[1])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Fact]:
    """Options, versions, devices and choices of two traces' metadata that are not the same."""
    found: list[Fact] = []
    for group in ("config", "versions", "device", "transfer", "sizes"):
        one, other = before.get(group, {}), after.get(group, {})
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name) and name != "trace_path":
                found.append(Fact(f"{group}.{name}", one.get(name), other.get(name)))
    return found
