"""Find the one source in a checkpoint of each tensor that a module needs. Pure: names, shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from streamflow.stages.errors import StreamflowError
from streamflow.weights.adapters import CheckpointAdapter, DropAdapter, RenameAdapter, TransformAdapter
from streamflow.weights.checkpoint_plan import Needed, SourceAssignment
from streamflow.weights.safetensors_header import TensorEntry
from streamflow.weights.strides import is_overlapping, is_row_major

#: How many problems, or names of one kind, a reason spells out.
SHOWN = 8

#: Proves that two tensors of the checkpoint (by name) agree in every byte.
SameBytes: TypeAlias = Callable[[str, str], bool]


class SourceMatcher:
    """Finds the one source of each tensor; collects what stands in the way and which names were used."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        adapters: tuple[CheckpointAdapter, ...],
        same_bytes: SameBytes | None,
    ) -> None:
        self.problems: list[str] = []
        self._entries, self._same_bytes = _kept(entries, adapters), same_bytes
        self._transforms = [adapter for adapter in adapters if isinstance(adapter, TransformAdapter)]
        renames = [adapter for adapter in adapters if isinstance(adapter, RenameAdapter)]
        self._renamed = _renamed(self._entries, renames)
        self._used_names: set[str] = set()
        self._used_transforms: set[int] = set()

    def assign(self, tensor: Needed) -> SourceAssignment | None:
        """The tensor's source; None (and a problem noted) if there is not exactly one."""
        try:
            assignment = self._adapted(tensor) or self._raw(tensor)
        except _Problem as problem:
            self.problems.append(f"{tensor.kind} {tensor.name!r} {problem}")
            return None
        if tensor.overlaps:
            self.problems.append(f"{tensor.kind} {tensor.name!r} shares memory with {some(tensor.overlaps)}")
        return assignment

    def leftovers(self) -> list[str]:
        """Problems with what nothing used: names of the checkpoint, and adapters without a target."""
        unmatched = tuple(f"{name!r}" for name in self._entries if name not in self._used_names)
        problems = [
            f"the adapter {adapter.label} matches no tensor of the module"
            for adapter in self._transforms
            if id(adapter) not in self._used_transforms
        ]
        if unmatched:
            count = len(unmatched)
            problems.append(
                f"{count} tensors of the checkpoint match nothing in the module: {some(unmatched)} "
                "(if loading leaves them out, say so with a DropAdapter)"
            )
        return problems

    def _adapted(self, tensor: Needed) -> SourceAssignment | None:
        found = [(adapter, sources) for adapter in self._transforms for sources in self._offers(adapter, tensor)]
        self._used_transforms.update(id(adapter) for adapter, _ in found)
        for _, sources in found:
            self._used_names.update(sources)
        if not found:
            return None
        if len(found) > 1:
            raise _Problem(f"can be made in several ways: {some([_way(*way) for way in found])}")
        adapter, sources = found[0]
        self._check_adapted(tensor, adapter, sources)
        return SourceAssignment(sources, adapter)

    def _offers(self, adapter: TransformAdapter, tensor: Needed) -> list[tuple[str, ...]]:
        """Distinct sources from which the adapter would make the tensor under its names; complete ones if any are."""
        offers = [sources for name in tensor.names if (sources := _sources_of(adapter, name)) is not None]
        complete = [sources for sources in offers if all(source in self._entries for source in sources)]
        return list(dict.fromkeys(complete or offers))

    def _check_adapted(self, tensor: Needed, adapter: TransformAdapter, sources: tuple[str, ...]) -> None:
        missing = [f"{name!r}" for name in sources if name not in self._entries]
        if missing:
            raise _Problem(f"is made by {adapter.label} from tensors that the checkpoint lacks: {some(missing)}")
        inputs = [(self._entries[name].dtype, self._entries[name].shape) for name in sources]
        try:
            dtype, shape = adapter.output_spec(tensor.name, inputs)
        except StreamflowError as failure:
            raise _Problem(f"cannot be proven: {failure}") from failure
        _check_kind(tensor, dtype, shape, f"what {adapter.label} makes")
        if is_overlapping(tensor.shape, tensor.stride):
            raise _Problem(f"is expanded: its strides {tensor.stride} lay elements over each other")

    def _raw(self, tensor: Needed) -> SourceAssignment:
        found = [source for name in tensor.names for source in self._renamed.get(name, ())]
        self._used_names.update(found)
        if not found:
            raise _Problem(f"is not in the checkpoint{self._rename_hint(tensor.name)}")
        entry = self._entries[found[0]]
        _check_kind(tensor, entry.dtype, entry.shape, f"the checkpoint's {found[0]!r}")
        if not is_row_major(tensor.shape, tensor.stride):
            raise _Problem(f"has the strides {tensor.stride}, but files hold tensors row by row; add a TensorAdapter")
        for other in found[1:]:
            self._prove_same(found[0], other)
        return SourceAssignment((found[0],))

    def _rename_hint(self, name: str) -> str:
        """How to map the one checkpoint name that ends like ``name``, if there is one; only for problems shown."""
        if len(self.problems) >= SHOWN:
            return ""
        longer = [source for source in self._entries if source.endswith(f".{name}")]
        if len(longer) != 1:
            return ""
        prefix = longer[0].removesuffix(name)
        return f" (RenameAdapter(prefixes={{{prefix!r}: ''}}) would give it {longer[0]!r})"

    def _prove_same(self, first: str, other: str) -> None:
        if self._same_bytes is None:
            raise _Problem(f"has two sources, {first!r} and {other!r}, that nothing proves equal")
        if not self._same_bytes(first, other):
            raise _Problem(f"has two sources, {first!r} and {other!r}, that differ")


class _Problem(Exception):
    """What stands in the way of one tensor; the sentence goes on after the tensor's name."""


def _way(adapter: TransformAdapter, sources: tuple[str, ...]) -> str:
    return f"{adapter.label} from {some(sources)}"


def _sources_of(adapter: TransformAdapter, name: str) -> tuple[str, ...] | None:
    try:
        return adapter.sources_for(name)
    except Exception as failure:  # a user's function of the name
        raise _Problem(f"cannot be proven: {adapter.label} failed to name its sources: {failure!r}") from failure


def _kept(entries: Mapping[str, TensorEntry], adapters: Iterable[CheckpointAdapter]) -> dict[str, TensorEntry]:
    """The checkpoint's tensors without those that an adapter drops."""
    drops = [adapter for adapter in adapters if isinstance(adapter, DropAdapter)]
    return {name: entry for name, entry in entries.items() if not any(adapter.drops(name) for adapter in drops)}


def _renamed(entries: Iterable[str], adapters: Iterable[RenameAdapter]) -> dict[str, list[str]]:
    """The checkpoint's names by the module's name that they stand for; adapters act one after another."""
    adapters = tuple(adapters)
    result: dict[str, list[str]] = {}
    for source in entries:
        name = source
        for adapter in adapters:
            name = adapter.rename(name)
        result.setdefault(name, []).append(source)
    return result


def _check_kind(tensor: Needed, dtype: str, shape: tuple[int, ...], source: str) -> None:
    if dtype != tensor.dtype:
        raise _Problem(
            f"is {tensor.dtype} in the module, but {source} is {dtype}; a checkpoint source never converts: "
            f"make the module {dtype}, or add a TensorAdapter that converts"
        )
    if tuple(shape) != tuple(tensor.shape):
        raise _Problem(f"has the shape {list(tensor.shape)} in the module, but {source} has {list(shape)}")


def some(texts: Sequence[str], separator: str = ", ") -> str:
    """The first ``SHOWN`` of ``texts`` and how many more there are."""
    more = len(texts) - SHOWN
    return separator.join(texts[:SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
