"""What the host weight store did for an offload, as a frozen value."""

from __future__ import annotations

from enum import StrEnum

import attrs

from streamflow.store.codes import StoreCode


class StoreOutcome(StrEnum):
    """How a model came to its weights."""

    #: An entry was there: nothing was loaded, and nothing produced.
    LOCAL_HIT = "local_hit"
    #: There was none: the weights were produced, published, and are used from the entry.
    PUBLISHED = "published"
    #: The store could not serve; the weights were loaded as if there were none.
    CANONICAL_FALLBACK = "canonical_fallback"
    #: The store could not serve, and loading without it was not allowed.
    FAILED = "failed"


@attrs.frozen
class StoreReport:
    """An outcome with its reason.

    ``code`` is None where nothing went wrong. ``source_id`` is None for a module that was loaded already (it has a
    content only); ``content_id`` and ``generation`` are None where no entry is used. ``remapped`` says that the
    module's own copies were dropped for a mapping of the entry.
    """

    outcome: StoreOutcome
    reason: str
    code: StoreCode | None = None
    source_id: str | None = None
    content_id: str | None = None
    generation: int | None = None
    remapped: bool = False
