"""One table of what is supported: whoever refuses something reads it, and says all reasons."""

from __future__ import annotations

import attrs
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from streamflow import WeightTopology
from streamflow.errors import ConfigurationError
from streamflow.host_weights.errors import NotStorableError
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.support import check_topology
from streamflow.ranks.gathering import choose_gathering
from streamflow.ranks.matrix import (
    FINAL_METHODS,
    TABLE,
    Axis,
    Parallelism,
    Way,
    check_parallelism,
    gather_problems,
    refusals,
)
from streamflow.ranks.topology import RankGroups
from streamflow.weights.checkpoint_plan import CheckpointFallback
from streamflow.weights.preflight import preflight
from tests.streamflow.ranks.fake_world import fake_world

#: One use of each axis.
USED = {
    Axis.DATA_PARALLEL: Parallelism(data_parallel_size=4),
    Axis.SEQUENCE_PARALLEL: Parallelism(sequence_parallel_size=4),
    Axis.TENSOR_PARALLEL: Parallelism(tensor_parallel_size=4),
    Axis.HSDP: Parallelism(hsdp=True),
    Axis.CFG_PARALLEL: Parallelism(cfg_parallel_size=2),
    Axis.PIPELINE_PARALLEL: Parallelism(pipeline_parallel_size=2),
    Axis.EXPERT_PARALLEL: Parallelism(expert_parallel_size=2),
    Axis.ONLINE_QUANTIZATION: Parallelism(online_quantization="int8"),
}
#: What is refused, axis by axis, written down a second time on purpose: a change of the table is a change of what is
#: promised.
REFUSED = {
    Way.GATHERED: set(Axis) - {Axis.DATA_PARALLEL, Axis.SEQUENCE_PARALLEL},
    Way.RANK_LOCAL: set(),
    Way.CHECKPOINT: {Axis.TENSOR_PARALLEL, Axis.HSDP, Axis.ONLINE_QUANTIZATION},
    Way.STORE: set(Axis) - {Axis.DATA_PARALLEL, Axis.SEQUENCE_PARALLEL, Axis.TENSOR_PARALLEL},
}

sizes = st.integers(1, 3)
topologies = st.builds(
    WeightTopology,
    tensor_parallel_size=sizes,
    tensor_parallel_rank=st.just(0),
    sequence_parallel_size=sizes,
    cfg_parallel_size=sizes,
    pipeline_parallel_size=sizes,
    expert_parallel_size=sizes,
    hsdp=st.booleans(),
    online_quantization=st.sampled_from([None, "fp8", *FINAL_METHODS]),
)


def test_the_table_has_each_axis_once() -> None:
    assert [row.axis for row in TABLE] == list(Axis) == list(USED)


@pytest.mark.parametrize("axis", Axis)
@pytest.mark.parametrize("way", Way)
def test_an_axis_is_refused_where_it_is_promised_to_be_with_its_numbers(axis: Axis, way: Way) -> None:
    found = list(refusals(USED[axis], way))
    assert [row.axis for row, _ in found] == ([axis] if axis in REFUSED[way] else [])
    assert all("{" not in reason for _, reason in found)
    assert list(refusals(Parallelism(), way)) == []


@given(topology=topologies, data_parallel_size=sizes)
def test_what_is_used_together_is_refused_for_each_reason(topology: WeightTopology, data_parallel_size: int) -> None:
    parallelism = Parallelism.of(topology, data_parallel_size=data_parallel_size)
    for way in Way:
        axes = {row.axis for row, _ in refusals(parallelism, way)}
        used = {axis for axis in Axis if parallelism.extent(axis) is not None}
        final = {Axis.ONLINE_QUANTIZATION} if topology.online_quantization in FINAL_METHODS else set()
        beside = {Axis.SEQUENCE_PARALLEL} if {Axis.SEQUENCE_PARALLEL, Axis.DATA_PARALLEL} <= used else set()
        gathered = way is Way.GATHERED
        assert axes == ((used & REFUSED[way]) - (final if gathered else set())) | (beside if gathered else set())


def test_requests_that_several_gather_groups_share_are_not_gathered() -> None:
    (problem,) = gather_problems(Parallelism(data_parallel_size=2, sequence_parallel_size=3))
    assert problem.startswith(
        "gathering with sequence parallel: one request runs on 3 ranks that are in 3 gather groups"
    )


@given(topology=topologies)
def test_preflight_and_the_store_refuse_what_the_table_refuses_and_no_more(topology: WeightTopology) -> None:
    parallelism = Parallelism.of(topology)
    planned = preflight([], {}, topology=topology)
    reasons = [reason for _, reason in refusals(parallelism, Way.CHECKPOINT)]
    assert (planned.reason if isinstance(planned, CheckpointFallback) else None) == next(iter(reasons), None)
    reasons = [reason for _, reason in refusals(parallelism, Way.STORE)]
    try:
        check_topology(topology, LoadInputs())
    except NotStorableError as failure:
        assert reasons[0] in str(failure)
        assert str(failure.code).startswith("unsupported_")
    else:
        assert reasons == []


def test_every_refusal_of_preflight_and_the_store_has_a_code() -> None:
    for axis in Axis:
        said = attrs.asdict(USED[axis], filter=lambda field, _: field.name != "data_parallel_size")
        topology = WeightTopology(**said, tensor_parallel_rank=0)
        assert isinstance(preflight([], {}, topology=topology), CheckpointFallback) == (axis in REFUSED[Way.CHECKPOINT])
        if axis in REFUSED[Way.STORE]:
            with pytest.raises(NotStorableError):
                check_topology(topology, LoadInputs())


def test_all_reasons_are_in_one_error_each_with_what_to_do() -> None:
    parallelism = Parallelism(data_parallel_size=2, tensor_parallel_size=2, hsdp=True, online_quantization="fp8")
    with pytest.raises(ConfigurationError) as caught:
        check_parallelism(parallelism, gathered=True)
    tensor, hsdp, quantization = caught.value.problems
    assert "tensor parallel: one request runs on 2 ranks" in tensor
    assert "second time" in hsdp
    assert "'fp8'" in quantization
    assert all("'gather': 'never'" in problem for problem in caught.value.problems)
    check_parallelism(parallelism, gathered=False)


@pytest.mark.parametrize("method", FINAL_METHODS)
def test_final_methods_of_quantization_may_be_gathered(method: str) -> None:
    assert gather_problems(Parallelism(data_parallel_size=2, online_quantization=method)) == []
    assert gather_problems(Parallelism(data_parallel_size=2, online_quantization=f"{method}_block")) != []


# Whether ranks gather


def test_nobody_gathers_alone_and_always_needs_to_know_the_ranks() -> None:
    for gather in ("auto", "never"):
        assert choose_gathering(None, Parallelism(), gather).group is None
    assert choose_gathering(RankGroups(), Parallelism(), "always").group is None  # the same program with one rank
    with pytest.raises(ConfigurationError, match="open_offload"):
        choose_gathering(None, Parallelism(), "always")


def test_ranks_gather_where_they_can_and_the_reason_is_said() -> None:
    with fake_world(1, 2):
        groups = RankGroups(data_parallel=dist.group.WORLD)
        two, sharded = Parallelism(data_parallel_size=2), Parallelism(data_parallel_size=2, hsdp=True)
        for gather in ("auto", "always"):
            choice = choose_gathering(groups, two, gather)
            assert choice.group is not None
            assert choice.group.ranks == (0, 1)
            assert choice.reason == "2 data-parallel ranks share the transfers"
        assert choose_gathering(groups, two, "never").group is None
        fallen_back = choose_gathering(groups, sharded, "auto")
        assert fallen_back.group is None
        assert "HSDP" in fallen_back.reason
        with pytest.raises(ConfigurationError, match="second time"):
            choose_gathering(groups, sharded, "always")
