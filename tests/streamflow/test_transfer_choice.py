"""Which transfer is taken, for every kind of device and source, and the reason that is given."""

from __future__ import annotations

import pytest

from streamflow.transfer_choice import choose_transfer

WHY_NOT_LOCKED = "the source is pageable"
ADAPTERS = "adapters make tensors"


def choose(asked: str, *, host: bool = False, locked: bool = False, never: str | None = None) -> tuple[str, str]:
    chosen = choose_transfer(
        asked, device_is_host=host, page_locked=locked, why_not_locked=WHY_NOT_LOCKED, why_not_direct=never
    )
    return chosen.name, chosen.reason


@pytest.mark.parametrize("asked", ["auto", "direct"])
def test_direct_where_the_device_can_read_the_source(asked: str) -> None:
    assert choose(asked, host=True) == ("direct", "the device is the host and reads the source itself")
    assert choose(asked, locked=True) == ("direct", "the block images are page-locked")


def test_staged_from_pageable_memory() -> None:
    assert choose("auto") == ("staged", WHY_NOT_LOCKED)


@pytest.mark.parametrize(("host", "locked"), [(True, False), (False, True), (False, False)])
def test_staged_wherever_something_rules_direct_out(host: bool, locked: bool) -> None:
    assert choose("auto", host=host, locked=locked, never=ADAPTERS) == ("staged", ADAPTERS)
    with pytest.raises(ValueError, match=f"'direct' is not possible: {ADAPTERS}; use transfer='auto'"):
        choose("direct", host=host, locked=locked, never=ADAPTERS)


def test_direct_is_refused_where_memory_is_pageable() -> None:
    with pytest.raises(ValueError, match=f"'direct' is not possible: {WHY_NOT_LOCKED}; use transfer='auto'"):
        choose("direct")


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("never", [None, ADAPTERS])
def test_staged_when_asked_for(host: bool, never: str | None) -> None:
    assert choose("staged", host=host, never=never) == ("staged", "asked for")
