"""Errors between a model and the store, and which of them loading without the store is an answer to."""

from __future__ import annotations

from collections.abc import Sequence

from streamflow.store.codes import StoreCode
from streamflow.store.errors import StoreError
from streamflow.store.reports import StoreOutcome, StoreReport

#: Codes that say: this model, or this machine, cannot use the store at all. Loading as if there were none is right.
_UNSUPPORTED = frozenset(code for code in StoreCode if code.startswith("unsupported_")) | {
    StoreCode.PARALLEL_RANK_UNAVAILABLE
}


def report_or_raise(failure: StoreError, source_id: str | None, *, is_required: bool) -> StoreReport:
    """The report that a model is loaded without the store because of ``failure``; else ``failure``, with its report.

    A collision, a wrong declaration and a model that is not the one that was stored are mistakes, which loading would
    hide: no mode goes on after one.

    :raises StoreError: ``failure`` itself, if the store is required or it is a mistake.
    """
    if is_required or not (failure.is_retryable or failure.code in _UNSUPPORTED):
        failure.report = StoreReport(StoreOutcome.FAILED, str(failure), failure.code, source_id)
        raise failure
    return StoreReport(StoreOutcome.CANONICAL_FALLBACK, str(failure), failure.code, source_id)


class NotStorableError(StoreError, TypeError):
    """Something about a model rules the store out; ``name`` says what, ``code`` which rule."""

    def __init__(self, code: StoreCode, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(code, f"{name} cannot be stored: {reason}; load this model without the store")


class EntryMissingError(StoreError, LookupError):
    """There is no entry, and it must not be made here; ``identity`` is what was looked for."""

    def __init__(self, identity: str, reason: str = "nobody has published it") -> None:
        self.identity, self.reason = identity, reason
        super().__init__(
            StoreCode.ENTRY_MISSING,
            f"the store has no entry for {identity} ({reason}), and store_mode='required' does not load without one; "
            "publish it first (`streamflow store publish`), or use store_mode='preferred'",
        )


class AmbiguousOwnershipError(StoreError, ValueError):
    """The finished model has other tensors than the entry of its identity; ``differences`` lists them."""

    def __init__(self, content_id: str, differences: Sequence[str]) -> None:
        self.content_id, self.differences = content_id, tuple(differences)
        super().__init__(
            StoreCode.AMBIGUOUS_OWNERSHIP,
            f"the stored entry {content_id} is not this model's: {'; '.join(differences)}; load= and finalize= must "
            "come to the same tensors whether the model has its values or not, and LoadInputs(producer_abi=...) has to "
            "change whenever they do",
        )


class UndeclaredProducerError(StoreError, ValueError):
    """Code of the caller takes part in making the weights, and nothing says which version of it."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = tuple(parts)
        super().__init__(
            StoreCode.INVALID_CONFIGURATION,
            f"{', '.join(parts)} decide the weights, so the store has to know their version: give them one, as in "
            "LoadInputs(producer_abi='my-loader 1'), and change it whenever they change",
        )


class UnstableConfigurationError(StoreError, TypeError):
    """The model's configuration has a value that cannot be a part of an identity."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(StoreCode.INVALID_CONFIGURATION, f"the model's {problem}; pass LoadInputs(model_config=...)")
