"""What a plan says. Values only; bytes are bytes."""

from __future__ import annotations

import attrs

from streamflow.tools.plan.model_dir import LeftOut
from streamflow.transfer_choice import SourceName


@attrs.frozen
class StackPlan:
    """A stack: its place in the model, and its block images as they would lie in slots."""

    path: str
    num_blocks: int
    num_resident_blocks: int
    min_block_bytes: int
    max_block_bytes: int
    total_bytes: int


@attrs.frozen
class SourcePlan:
    """What streaming from one source would take.

    ``problem`` says why it cannot be the source; None if nothing stands against it. ``weight_host_bytes`` are private
    host memory that holds weights, ``page_locked_bytes`` the part of it that is locked; ``registered_bytes`` are files'
    pages in the page cache that would be locked there, if the machine proves able to; ``staging_bytes`` are
    page-locked buffers besides. ``fixed_bytes`` are device bytes of what is outside the blocks. ``transfer`` is
    ``direct`` or ``staged``; None if it is not possible.
    """

    name: SourceName
    problem: str | None
    weight_host_bytes: int
    page_locked_bytes: int
    registered_bytes: int
    staging_bytes: int
    fixed_bytes: int
    transfer: str | None
    transfer_reason: str


@attrs.frozen
class ComponentPlan:
    """What of a component would stream. ``weight_bytes`` are those of all its tensors, as the files hold them.

    ``stacks`` is empty where the names show none: such a component cannot be opened. ``resident_blocks`` counts blocks
    over all stacks, in their order. ``streamed_bytes`` are the images of the others: what a walk fetches.
    ``source`` is the one that would be chosen, None where nothing streams; ``source_reason`` says why. ``behaviour`` is
    what it does when its pipeline is opened as a whole (None: it is no pipeline's): ``streamed``, ``staged`` or
    ``resident``.
    """

    name: str
    kind: str | None
    behaviour: str | None
    path: str
    num_files: int
    num_tensors: int
    dtype_bytes: dict[str, int]
    weight_bytes: int
    stacks: tuple[StackPlan, ...]
    block_bytes: int
    resident_blocks: tuple[int, ...]
    resident_bytes: int
    num_slots: int
    slot_bytes: int
    window_bytes: int
    streamed_bytes: int
    source: str | None
    source_reason: str
    sources: tuple[SourcePlan, ...]
    device_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all stacks."""
        return sum(stack.num_blocks for stack in self.stacks)

    @property
    def chosen(self) -> SourcePlan | None:
        """The source that would be chosen; None where nothing streams."""
        return next((source for source in self.sources if source.name == self.source), None)


@attrs.frozen
class ModelPlan:
    """The plan of a model: its components, and what to know about the plan as a whole.

    ``device`` is the kind of device that was planned for, ``options`` are those of the configuration, and
    ``host_available_bytes`` those of this machine; None where it does not tell.
    """

    path: str
    is_pipeline: bool
    device: str
    options: dict[str, object]
    host_available_bytes: int | None
    components: tuple[ComponentPlan, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
