"""The ranks that a process belongs to, from groups that exist already; none is created here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streamflow.ranks.errors import RankGroupError, TopologyMismatchError
from streamflow.ranks.matrix import Axis, Parallelism
from streamflow.ranks.mesh import USUAL_NAMES, dimensions_of, own_rank
from streamflow.weights.topology import WeightTopology

#: Who gathers: the first of these axes that has more than one rank. Never tensor-parallel ranks: they hold other bytes.
_GATHERING = (Axis.DATA_PARALLEL, Axis.SEQUENCE_PARALLEL)

Group = dist.ProcessGroup | DeviceMesh


@attrs.frozen(kw_only=True)
class RankGroups:
    """How this process's model is spread over ranks, by groups that its owner made and keeps open.

    Each is a `torch.distributed.ProcessGroup` or a `DeviceMesh` of one dimension that this rank is in. None: there is
    no such group, and the axis has as many ranks as `WeightTopology` says; there is one data-parallel rank.

    Attributes:
        data_parallel: ranks with the same weights and requests of their own. These gather, if there are several: give
            those of one node.
        sequence_parallel: ranks with the same weights that share each request. These gather if data-parallel ones do
            not.
        tensor_parallel: ranks that hold different parts of each tensor.
        cfg_parallel: ranks that do different guidance branches of a request.
        pipeline_parallel: ranks that hold different stages.
        expert_parallel: ranks that hold different experts.
        hsdp: parameters are sharded by hybrid sharded data parallelism.

    :raises RankGroupError: if something is no such group, this rank is not in it, or two axes have the same ranks.
    """

    data_parallel: Group | None = None
    sequence_parallel: Group | None = None
    tensor_parallel: Group | None = None
    cfg_parallel: Group | None = None
    pipeline_parallel: Group | None = None
    expert_parallel: Group | None = None
    hsdp: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.hsdp, bool):
            raise RankGroupError("hsdp", f"must be True or False, not {self.hsdp!r}")
        members = {axis: set(self.members(axis)) for axis in USUAL_NAMES if axis is not Axis.EXPERT_PARALLEL}
        for (one, its), (other, others) in itertools.combinations(members.items(), 2):
            if len(its & others) > 1:
                raise RankGroupError(one, f"shares ranks {sorted(its & others)} with {other}; each axis has its own")

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        data_parallel: str | None = None,
        sequence_parallel: str | None = None,
        tensor_parallel: str | None = None,
        cfg_parallel: str | None = None,
        pipeline_parallel: str | None = None,
        expert_parallel: str | None = None,
        hsdp: bool = False,
    ) -> RankGroups:
        """The groups of the mesh's dimensions. A name of None: ``dp``, ``sp``, ``tp``, ``cfg``, ``pp`` or ``ep``, where
        the mesh has it.

        A dimension that is none of them has to be left out of ``mesh``: with the nodes as the first dimension,
        ``mesh["dp"]`` are this node's ranks.

        :raises MeshDimensionError: if the mesh has no dimension of a given name, or one of several ranks that no name
            is for; it lists the dimensions that there are.
        :raises RankGroupError: if this rank is not in the mesh.
        """
        names = {
            Axis.DATA_PARALLEL: data_parallel,
            Axis.SEQUENCE_PARALLEL: sequence_parallel,
            Axis.TENSOR_PARALLEL: tensor_parallel,
            Axis.CFG_PARALLEL: cfg_parallel,
            Axis.PIPELINE_PARALLEL: pipeline_parallel,
            Axis.EXPERT_PARALLEL: expert_parallel,
        }
        found = {axis.value: mesh.get_group(name) for axis, name in dimensions_of(mesh, names)}
        return cls(**found, hsdp=hsdp)

    def members(self, axis: Axis) -> tuple[int, ...]:
        """The global ranks of the axis's group in its order; this rank alone where there is none.

        :raises RankGroupError: if the group is none any more.
        """
        group = getattr(self, axis.value)
        return (own_rank(),) if group is None else _members(axis, group)


@attrs.frozen
class GatherGroup:
    """The ranks that gather: global ranks by their index in the group, and the own index. At least two ranks."""

    axis: Axis
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """How many ranks gather."""
        return len(self.ranks)


def rank_groups(given: RankGroups | DeviceMesh | None) -> RankGroups | None:
    """What ``open_offload(ranks=...)`` was given, as groups.

    :raises MeshDimensionError: if a mesh's dimensions are not named as usual.
    :raises RankGroupError: if it is neither groups nor a mesh, or this rank is not in the mesh.
    """
    if isinstance(given, DeviceMesh):
        return RankGroups.from_mesh(given)
    if given is not None and not isinstance(given, RankGroups):
        raise RankGroupError("ranks", f"must be RankGroups or a DeviceMesh, not {given!r}")
    return given


def gather_ranks(groups: RankGroups) -> GatherGroup | None:
    """Who gathers: the data-parallel ranks if there are several, else the sequence-parallel ones, if there are several.

    None: this rank alone. The order of ranks is that of the group, so it is the same on all of them.
    """
    for axis in _GATHERING:
        ranks = groups.members(axis)
        if len(ranks) > 1:
            return GatherGroup(axis, ranks, ranks.index(own_rank()))
    return None


def resolved_topology(groups: RankGroups, topology: WeightTopology) -> WeightTopology:
    """``topology`` with what it leaves at its default filled in from the groups.

    :raises TopologyMismatchError: if both say something, and not the same.
    """
    found: dict[str, Any] = dict(_found(groups))
    defaults = WeightTopology()
    for name, value in found.items():
        declared = getattr(topology, name)
        if declared not in (value, getattr(defaults, name)):
            raise TopologyMismatchError(name, declared, value)
    return attrs.evolve(topology, **found)


def parallelism_of(groups: RankGroups | None, topology: WeightTopology) -> Parallelism:
    """How the model is spread, of both.

    :raises TopologyMismatchError: if they differ.
    """
    if groups is None:
        return Parallelism.of(topology)
    size = len(groups.members(Axis.DATA_PARALLEL))
    return Parallelism.of(resolved_topology(groups, topology), data_parallel_size=size)


def _found(groups: RankGroups) -> Iterator[tuple[str, int | bool]]:
    """What the groups say of fields of the topology, which does not know the data-parallel size."""
    for axis in USUAL_NAMES:
        if axis is not Axis.DATA_PARALLEL and getattr(groups, axis.value) is not None:
            yield f"{axis.value}_size", len(groups.members(axis))
    if groups.tensor_parallel is not None:
        yield "tensor_parallel_rank", groups.members(Axis.TENSOR_PARALLEL).index(own_rank())
    if groups.hsdp:
        yield "hsdp", True


def _members(axis: Axis, group: object) -> tuple[int, ...]:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise RankGroupError(axis, f"must be a mesh of one dimension, not {group!r}; slice it (mesh['dp'])")
        if group.get_coordinate() is None:
            raise RankGroupError(axis, f"rank {own_rank()} is not in {group!r}")
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RankGroupError(axis, f"rank {own_rank()} is not in this group; give every rank the group that it is in")
    if not isinstance(group, dist.ProcessGroup):
        raise RankGroupError(axis, f"must be a ProcessGroup, a DeviceMesh of one dimension or None, not {group!r}")
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise RankGroupError(
            axis, "the process group was destroyed; it has to stay while the offload is open"
        ) from None
