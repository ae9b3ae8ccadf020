"""Errors of what callers say about ranks (groups, meshes, sizes, nodes) and of ranks that hold one model together.

Those of ranks at work are in the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamflow.stages.errors import StreamflowError


class RankGroupError(StreamflowError, ValueError):
    """What was given as the group of an axis is none that this rank can use; ``axis`` is its name."""

    def __init__(self, axis: str, problem: str) -> None:
        self.axis, self.problem = axis, problem
        super().__init__(f"{axis}: {problem}")


class MeshDimensionError(StreamflowError, LookupError):
    """A device mesh has no dimension of these names, or others that nobody said a meaning of.

    ``names`` are the dimensions at fault, ``known`` those that the mesh has.
    """

    def __init__(self, problem: str, names: Sequence[str], known: Sequence[str]) -> None:
        self.problem, self.names, self.known = problem, tuple(names), tuple(known)
        listed = ", ".join(map(repr, known)) if known else "none with a name"
        super().__init__(f"{problem}; dimensions of the mesh: {listed}")


class TopologyMismatchError(StreamflowError, ValueError):
    """The declared topology and the groups differ; ``name`` is the field, ``declared`` and ``found`` its two values."""

    def __init__(self, name: str, declared: object, found: object) -> None:
        self.name, self.declared, self.found = name, declared, found
        super().__init__(
            f"WeightTopology says {name}={declared}, but the groups of the ranks say {found}; leave {name} out, and it "
            "is taken from the groups, or give the group that was meant"
        )


class NodesDifferError(StreamflowError, ValueError):
    """The ranks of a gather group are on several nodes; ``nodes`` has the ranks of each, by the node's name."""

    def __init__(self, nodes: Mapping[str, Sequence[int]]) -> None:
        self.nodes = {name: tuple(ranks) for name, ranks in nodes.items()}
        listed = "; ".join(f"{name}: ranks {', '.join(map(str, ranks))}" for name, ranks in self.nodes.items())
        super().__init__(
            f"the ranks that would gather are on {len(self.nodes)} nodes ({listed}), and slices go over the links "
            "inside a node only; give each node's ranks a group of their own (a mesh with the nodes as its first "
            "dimension, ranks=mesh['dp']), or set ranks={'gather': 'never'}"
        )


class WaveBudgetError(StreamflowError, ValueError):
    """The device budget is such that requests of one rank could wait for each other: for room, and for a wave.

    ``needed`` are the bytes at once of what moves, ``left`` those that the budget leaves beside what is always there.
    """

    def __init__(self, components: Sequence[str], needed: int, left: int, budget: int) -> None:
        self.components, self.needed, self.left, self.budget = tuple(components), needed, left, budget
        super().__init__(
            f"the residents of {', '.join(components)}, beside the largest component that comes as a whole, take "
            f"{needed:,} bytes, and device_budget_bytes={budget:,} leaves {left:,}: where ranks gather, a request that "
            "waits for a wave would keep the room that one in a wave needs; raise the budget, keep fewer blocks "
            "resident, or set max_running_requests=1"
        )


class SharedImagesError(StreamflowError, RuntimeError):
    """The ranks cannot keep one host copy of ``component`` among them, because of what ``rank`` met."""

    def __init__(self, component: str, rank: int, reason: str) -> None:
        self.component, self.rank, self.reason = component, rank, reason
        super().__init__(
            f"the ranks share no host copy of {component}: rank {rank}: {reason}; let them share an entry of the host "
            "weight store instead (store_mode='preferred')"
        )


class WeightsDifferError(StreamflowError, ValueError):
    """Rank ``rank`` has other weights than rank 0 of its group.

    ``block`` is the block of ``component`` where it was seen, None where they have other blocks; ``tensor`` is the name
    of the tensor, None where the block has others.
    """

    def __init__(self, component: str, rank: int, block: str | None, tensor: str | None) -> None:
        self.component, self.rank, self.block, self.tensor = component, rank, block, tensor
        what = f"other blocks of {component}" if block is None else f"other tensors in {block} of {component}"
        if tensor is not None:
            what = f"other values in {tensor} ({block} of {component})"
        super().__init__(
            f"rank {rank} has {what} than rank 0, but the ranks of a group stream the same weights; "
            "load the same checkpoint with the same options on each of them"
        )
