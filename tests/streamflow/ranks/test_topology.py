"""Who gathers, read from groups and meshes that are there; wrong ones are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamflow import RankGroups, WeightTopology
from streamflow.ranks.errors import MeshDimensionError, NodesDifferError, RankGroupError, TopologyMismatchError
from streamflow.ranks.matrix import Axis, Parallelism
from streamflow.ranks.mesh import USUAL_NAMES
from streamflow.ranks.nodes import Node, check_one_node, own_node
from streamflow.ranks.topology import (
    GatherGroup,
    gather_ranks,
    parallelism_of,
    rank_groups,
    resolved_topology,
)
from tests.streamflow.ranks.fake_world import fake_world


@pytest.fixture
def world() -> Iterator[None]:
    """This process is rank 5 of 8."""
    with fake_world(5, 8):
        yield


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def num_groups() -> int:
    return dist.get_pg_count()


# Groups and meshes


def test_a_process_that_is_alone_gathers_with_nobody() -> None:
    assert gather_ranks(RankGroups()) is None
    assert rank_groups(None) is None
    assert parallelism_of(None, WeightTopology(hsdp=True)) == Parallelism(hsdp=True)


@pytest.mark.usefixtures("world")
def test_a_mesh_is_read_by_the_usual_names_and_nothing_is_created() -> None:
    mesh = mesh_of(dp=2, sp=2, tp=2)
    before = num_groups()
    groups = RankGroups.from_mesh(mesh)
    assert groups.data_parallel is mesh.get_group("dp")
    assert [groups.members(axis) for axis in USUAL_NAMES] == [(1, 5), (5, 7), (4, 5), (5,), (5,), (5,)]
    assert gather_ranks(groups) == GatherGroup(Axis.DATA_PARALLEL, (1, 5), 1)
    assert rank_groups(mesh) == groups
    assert rank_groups(groups) is groups
    assert num_groups() == before


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_mesh_without_names_of_its_own_is_read_by_given_ones(size: int) -> None:
    names = {"data_parallel": "replica", "sequence_parallel": "dp"}  # a usual name for something else
    shape = [(8, 1), (1, 8), (2, 4)][size]
    groups = RankGroups.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp")), **names)
    assert (len(groups.members(Axis.DATA_PARALLEL)), len(groups.members(Axis.SEQUENCE_PARALLEL))) == shape


@pytest.mark.usefixtures("world")
def test_missing_and_unread_dimensions_are_refused_with_those_there_are() -> None:
    mesh = mesh_of(node=2, dp=4)
    with pytest.raises(MeshDimensionError, match=r"no dimension 'data' or 'ring'; .* 'node', 'dp'") as missing:
        RankGroups.from_mesh(mesh, data_parallel="data", sequence_parallel="ring")
    assert (missing.value.names, missing.value.known) == (("data", "ring"), ("node", "dp"))
    with pytest.raises(MeshDimensionError, match=r"'node' is for.*mesh\['dp'\]") as unread:
        rank_groups(mesh)
    assert unread.value.names == ("node",)
    with pytest.raises(MeshDimensionError, match="none with a name"):
        RankGroups.from_mesh(init_device_mesh("cpu", (8,)))
    assert gather_ranks(RankGroups.from_mesh(mesh["dp"])) == GatherGroup(Axis.DATA_PARALLEL, (4, 5, 6, 7), 1)


@pytest.mark.usefixtures("world")
def test_a_dimension_of_one_rank_needs_no_name() -> None:
    assert gather_ranks(RankGroups.from_mesh(mesh_of(node=1, sp=8))) == GatherGroup(
        Axis.SEQUENCE_PARALLEL, tuple(range(8)), 5
    )


@pytest.mark.usefixtures("world")
def test_groups_and_meshes_of_one_dimension_are_taken_alike() -> None:
    mesh = mesh_of(dp=2, sp=4)
    as_meshes = RankGroups(data_parallel=mesh["dp"], sequence_parallel=mesh["sp"])
    as_groups = RankGroups(data_parallel=mesh.get_group("dp"), sequence_parallel=mesh.get_group("sp"))
    assert gather_ranks(as_meshes) == gather_ranks(as_groups) == GatherGroup(Axis.DATA_PARALLEL, (1, 5), 1)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("sizes", "axis", "ranks"),
    [
        ({"dp": 8}, Axis.DATA_PARALLEL, tuple(range(8))),
        ({"dp": 1, "sp": 8}, Axis.SEQUENCE_PARALLEL, tuple(range(8))),
        ({"dp": 2, "sp": 4}, Axis.DATA_PARALLEL, (1, 5)),
        ({"dp": 1, "sp": 2, "tp": 4}, Axis.SEQUENCE_PARALLEL, (1, 5)),
        ({"tp": 8}, None, None),
        ({"cfg": 2, "pp": 2, "ep": 2}, None, None),
    ],
    ids=str,
)
def test_data_parallel_ranks_gather_else_sequence_parallel_ones_never_others(
    sizes: dict[str, int], axis: Axis | None, ranks: tuple[int, ...] | None
) -> None:
    found = gather_ranks(RankGroups.from_mesh(mesh_of(**sizes)))
    assert found == (None if axis is None or ranks is None else GatherGroup(axis, ranks, ranks.index(5)))


@pytest.mark.usefixtures("world")
def test_the_order_is_that_of_the_group() -> None:
    group = dist.new_group([7, 5, 6])
    found = gather_ranks(RankGroups(data_parallel=group))
    assert found is not None
    assert found.ranks == tuple(dist.get_process_group_ranks(group))
    assert found.index == dist.get_rank(group)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("dp", "must be a ProcessGroup"),
        (2, "must be a ProcessGroup"),
        ([0, 1], "must be a ProcessGroup"),
    ],
)
def test_what_is_no_group_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(RankGroupError, match=f"tensor_parallel: {said}"):
        RankGroups(tensor_parallel=wrong)
    with pytest.raises(RankGroupError, match="ranks: must be RankGroups"):
        rank_groups(wrong)


@pytest.mark.usefixtures("world")
def test_groups_that_this_rank_is_not_in_are_refused() -> None:
    with pytest.raises(RankGroupError, match="rank 5 is not in this group"):
        RankGroups(data_parallel=dist.new_group([0, 1]))
    others = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    with pytest.raises(RankGroupError, match="rank 5 is not in"):
        RankGroups(data_parallel=others)
    with pytest.raises(RankGroupError, match="mesh: rank 5 is not in"):
        RankGroups.from_mesh(others)


@pytest.mark.usefixtures("world")
def test_a_mesh_of_two_dimensions_two_axes_over_one_group_and_a_wrong_switch_are_refused() -> None:
    mesh = mesh_of(dp=2, sp=4)
    with pytest.raises(RankGroupError, match=r"data_parallel: must be a mesh of one dimension.*mesh\['dp'\]"):
        RankGroups(data_parallel=mesh)
    with pytest.raises(RankGroupError, match=r"data_parallel: shares ranks \[1, 5\] with cfg_parallel"):
        RankGroups(data_parallel=mesh["dp"], cfg_parallel=mesh["dp"])
    with pytest.raises(RankGroupError, match="hsdp: must be True or False"):
        RankGroups(hsdp=1)  # type: ignore[arg-type]
    assert RankGroups(data_parallel=mesh["dp"], expert_parallel=mesh["dp"]).members(Axis.EXPERT_PARALLEL) == (1, 5)


def test_a_group_that_was_destroyed_is_refused() -> None:
    with fake_world(0, 2):
        groups = RankGroups(data_parallel=dist.group.WORLD)
    with pytest.raises(RankGroupError, match="was destroyed"):
        gather_ranks(groups)


# The declared topology


@pytest.mark.usefixtures("world")
def test_what_the_topology_leaves_out_is_taken_from_the_groups() -> None:
    groups = RankGroups.from_mesh(mesh_of(dp=2, sp=2, tp=2))
    topology = resolved_topology(groups, WeightTopology(ulysses_degree=2))
    assert topology == WeightTopology(
        sequence_parallel_size=2, tensor_parallel_size=2, tensor_parallel_rank=1, ulysses_degree=2
    )
    assert resolved_topology(groups, topology) == topology
    assert parallelism_of(groups, WeightTopology()) == Parallelism(
        data_parallel_size=2, sequence_parallel_size=2, tensor_parallel_size=2
    )


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("declared", "name", "values"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size", (4, 2)),
        ({"tensor_parallel_size": 2, "tensor_parallel_rank": 0}, "tensor_parallel_rank", (0, 1)),
        ({"sequence_parallel_size": 3}, "sequence_parallel_size", (3, 4)),
    ],
)
def test_a_topology_that_says_something_else_is_refused_with_both_numbers(
    declared: dict[str, int], name: str, values: tuple[int, int]
) -> None:
    groups = RankGroups.from_mesh(mesh_of(sp=4, tp=2))
    with pytest.raises(TopologyMismatchError, match=f"{name}={values[0]}, .* say {values[1]}") as caught:
        parallelism_of(groups, WeightTopology(**declared))  # type: ignore[arg-type]
    assert (caught.value.name, caught.value.declared, caught.value.found) == (name, *values)


@pytest.mark.usefixtures("world")
def test_an_axis_without_a_group_is_as_the_topology_says() -> None:
    groups = RankGroups(data_parallel=dist.group.WORLD, hsdp=True)
    declared = WeightTopology(tensor_parallel_size=2, tensor_parallel_rank=0, online_quantization="fp8")
    assert parallelism_of(groups, declared) == Parallelism(
        data_parallel_size=8, tensor_parallel_size=2, hsdp=True, online_quantization="fp8"
    )


# Nodes

GROUP = GatherGroup(Axis.DATA_PARALLEL, (4, 5, 6), 0)


def test_ranks_of_one_node_may_gather_whatever_their_containers_are_called() -> None:
    check_one_node(GROUP, [own_node().to_wire()] * 3)
    check_one_node(GROUP, [Node(name, "5-5").to_wire() for name in ("pod-a", "pod-b", "pod-c")])


def test_ranks_of_several_nodes_are_refused_with_the_ranks_of_each() -> None:
    nodes = [Node("same", boot_id).to_wire() for boot_id in ("aaaa-1", "bbbb-2", "aaaa-1")]
    with pytest.raises(NodesDifferError, match=r"ranks 4, 6; .*ranks 5") as caught:
        check_one_node(GROUP, nodes)
    assert list(caught.value.nodes.values()) == [(4, 6), (5,)]
    assert "'never'" in str(caught.value)


def test_without_a_boot_id_the_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamflow.ranks.nodes._BOOT_ID", "/no/such/file")
    assert own_node().boot_id == ""
    with pytest.raises(NodesDifferError, match="one: ranks 4, 5; two: ranks 6"):
        check_one_node(GROUP, [Node("one", "").to_wire(), Node("one", "").to_wire(), Node("two", "").to_wire()])
