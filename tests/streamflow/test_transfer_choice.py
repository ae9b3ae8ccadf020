"""Which source and transfer are taken, for every kind of device, source and option, and the reasons that are given."""

from __future__ import annotations

import itertools

import attrs
import pytest

from streamflow.config import OffloadConfig
from streamflow.errors import ConfigurationError
from streamflow.transfer_choice import (
    SourceCandidate,
    TransferChoice,
    choose,
    choose_source,
    why_not_page_locked,
    why_not_registered_by_options,
    why_too_much,
)

ADAPTERS = "adapters make tensors"
REFUSED = "the probe did not answer"
ARTIFACT = SourceCandidate("artifact", "published")
CHECKPOINT = SourceCandidate("checkpoint", "proven")
MODULE = SourceCandidate("module", "loaded")


def options(transfer: str = "auto", **others: object) -> OffloadConfig:
    return OffloadConfig.from_mapping({"device": "cpu", "transfer": transfer, **others})


def chosen(
    *candidates: SourceCandidate,
    transfer: str = "auto",
    host: bool = False,
    refused: str | None = None,
    **others: object,
) -> TransferChoice:
    return choose(candidates, options(transfer, **others), device_is_host=host, why_not_registered=refused)


@pytest.mark.parametrize("candidate", [ARTIFACT, CHECKPOINT, MODULE], ids=lambda candidate: candidate.name)
@pytest.mark.parametrize("transfer", ["auto", "direct"])
def test_direct_where_the_device_can_read_the_source(candidate: SourceCandidate, transfer: str) -> None:
    on_host = chosen(candidate, transfer=transfer, host=True, refused="the device is the host")
    assert (on_host.transfer, on_host.transfer_reason) == (
        "direct",
        "the device is the host and reads the source itself",
    )
    locked = chosen(candidate, transfer=transfer)
    what = "block images" if candidate is MODULE else "mapped files"
    assert (locked.transfer, locked.transfer_reason) == ("direct", f"the {what} are page-locked")
    assert (locked.source, locked.source_reason) == (candidate.name, candidate.reason)


@pytest.mark.parametrize("candidate", [ARTIFACT, CHECKPOINT], ids=lambda candidate: candidate.name)
def test_files_that_are_not_registered_are_staged_and_asking_for_more_is_refused(candidate: SourceCandidate) -> None:
    choice = chosen(candidate, refused=REFUSED)
    assert choice.transfer == "staged"
    assert choice.transfer_reason == f"the {candidate.name} source is pageable memory ({REFUSED})"
    with pytest.raises(ConfigurationError, match=rf"'direct' is not possible: .*{REFUSED}.*; use transfer='auto'"):
        chosen(candidate, transfer="direct", refused=REFUSED)


def test_a_module_does_not_depend_on_the_registration_of_files() -> None:
    assert chosen(MODULE, refused=REFUSED).transfer == "direct"
    unpinned = chosen(MODULE, pin_host_memory=False)
    assert (unpinned.transfer, unpinned.transfer_reason) == (
        "staged",
        "the module source is pageable memory (pin_host_memory=False)",
    )


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("candidate", [ARTIFACT, CHECKPOINT, MODULE], ids=lambda candidate: candidate.name)
def test_staged_wherever_something_rules_direct_out(candidate: SourceCandidate, host: bool) -> None:
    adapted = attrs.evolve(candidate, why_not_direct=ADAPTERS)
    assert chosen(adapted, host=host).transfer_reason == ADAPTERS
    assert chosen(adapted, host=host).transfer == "staged"
    with pytest.raises(ConfigurationError, match=f"'direct' is not possible: {ADAPTERS}; use transfer='auto'"):
        chosen(adapted, transfer="direct", host=host)


@pytest.mark.parametrize("host", [False, True])
def test_staged_when_asked_for(host: bool) -> None:
    choice = chosen(attrs.evolve(CHECKPOINT, why_not_direct=ADAPTERS), transfer="staged", host=host)
    assert (choice.transfer, choice.transfer_reason) == ("staged", "asked for")


def test_the_artifact_is_preferred_with_registration_and_the_checkpoint_without() -> None:
    for candidates in itertools.permutations([ARTIFACT, CHECKPOINT, MODULE]):
        registered = chosen(*candidates)
        assert (registered.source, registered.transfer) == ("artifact", "direct")
        assert registered.source_reason.startswith("published; its images are registered whole")
        for refused in ("host_registration_limit_bytes=0", REFUSED):
            pageable = chosen(*candidates, refused=refused)
            assert (pageable.source, pageable.source_reason, pageable.transfer) == ("checkpoint", "proven", "staged")


def test_what_is_not_possible_is_passed_over_and_what_stands_against_all_is_said() -> None:
    broken = attrs.evolve(CHECKPOINT, problem="unsupported_tp: 2 ranks")
    assert chosen(broken, MODULE).source == "module"
    unexplained = SourceCandidate("module")
    assert chosen(broken, unexplained).source_reason == "no checkpoint: unsupported_tp: 2 ranks"
    assert choose_source([broken], why_not_registered=None) == (None, "no checkpoint: unsupported_tp: 2 ranks")
    assert choose_source([], why_not_registered=None) == (None, "there are no blocks")
    with pytest.raises(ConfigurationError, match="nothing to stream from: no checkpoint: unsupported_tp"):
        chosen(broken)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"transfer": "staged"}, "a staged transfer was asked for"),
        ({"pin_host_memory": False}, "pin_host_memory=False"),
        ({"host_registration_limit_bytes": 0}, "host_registration_limit_bytes=0"),
        ({"host_registration_limit_bytes": 1}, None),
    ],
    ids=str,
)
def test_options_that_turn_registration_off(given: dict[str, object], reason: str | None) -> None:
    assert why_not_registered_by_options(options(**given), device_is_host=False) == reason  # type: ignore[arg-type]
    assert why_not_registered_by_options(options(**given), device_is_host=True) is not None  # type: ignore[arg-type]


def test_the_limit_on_files_does_not_count_for_private_images() -> None:
    assert why_not_page_locked(options(host_registration_limit_bytes=0), device_is_host=False) is None


@pytest.mark.parametrize(
    ("limit", "available", "reason"),
    [
        (None, None, None),
        (1000, 1000, None),
        (999, None, "its 1,000 bytes are over host_registration_limit_bytes=999"),
        (None, 999, "its 1,000 bytes are more than the 999 that this machine or cgroup has for them"),
    ],
)
def test_what_is_too_much(limit: int | None, available: int | None, reason: str | None) -> None:
    assert why_too_much(1000, limit_bytes=limit, available_bytes=available) == reason
