"""Which dimension of a device mesh is which axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streamflow.ranks.errors import MeshDimensionError, RankGroupError
from streamflow.ranks.matrix import Axis

#: The axes that are groups of ranks, each with the dimension of a mesh that is taken for it where nothing is said.
USUAL_NAMES = {
    Axis.DATA_PARALLEL: "dp",
    Axis.SEQUENCE_PARALLEL: "sp",
    Axis.TENSOR_PARALLEL: "tp",
    Axis.CFG_PARALLEL: "cfg",
    Axis.PIPELINE_PARALLEL: "pp",
    Axis.EXPERT_PARALLEL: "ep",
}


def own_rank() -> int:
    """This process's global rank; 0 where there are no others."""
    return dist.get_rank() if dist.is_initialized() else 0


def dimensions_of(mesh: DeviceMesh, names: Mapping[Axis, str | None]) -> Iterator[tuple[Axis, str]]:
    """The axes that the mesh has, each with its dimension; ``names``: what callers call them, None for as usual.

    :raises MeshDimensionError: if a given name is missing, or a dimension of several ranks is none of them.
    :raises RankGroupError: if this rank is not in the mesh.
    """
    known = mesh.mesh_dim_names or ()
    missing = [name for name in names.values() if name is not None and name not in known]
    if missing:
        raise MeshDimensionError(f"the mesh has no dimension {' or '.join(map(repr, missing))}", missing, known)
    said = {axis: name for axis, name in names.items() if name is not None}
    usual = {axis: name for axis, name in USUAL_NAMES.items() if axis not in said and name not in said.values()}
    taken = said | usual
    unread = [name for name in known if name not in taken.values() and mesh.size(known.index(name)) > 1]
    if unread or not known:
        problem = f"nobody said what {' and '.join(map(repr, unread)) or 'a dimension without a name'} is for"
        advice = "give its name (data_parallel='...'), or slice the mesh (mesh['dp'])"
        raise MeshDimensionError(f"{problem}: {advice}", unread, known)
    if mesh.get_coordinate() is None:
        raise RankGroupError("mesh", f"rank {own_rank()} is not in {mesh!r}")
    yield from ((axis, name) for axis, name in taken.items() if name in known)
