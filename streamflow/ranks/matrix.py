"""Which ways of spreading a model over ranks go with which ways of getting its weights. Pure: no torch, no clock.

One table. Opening, preflight, the host weight store and the documentation read it; nobody else decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import attrs

from streamflow.errors import ConfigurationError
from streamflow.weights.topology import WeightTopology


class Axis(StrEnum):
    """A way of spreading a model over ranks, or of converting its weights. Values are names of fields."""

    DATA_PARALLEL = "data_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    HSDP = "hsdp"
    CFG_PARALLEL = "cfg_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    ONLINE_QUANTIZATION = "online_quantization"


class Way(StrEnum):
    """A way of getting weights: two for the transfer of blocks, and the two sources that not every model can have.

    The third source, the loaded module, is there for all of them.
    """

    GATHERED = "gathered"
    RANK_LOCAL = "rank_local"
    CHECKPOINT = "checkpoint"
    STORE = "store"


@attrs.frozen
class Cell:
    """``refused``: why it is not supported, with ``{n}`` for the ranks or the method; None: it is.

    ``note``: what has to be known of it. ``unless``: methods of conversion for which it is supported all the same.
    ``beside``: the axis that has to be in use, too, for the refusal to count; None: it counts alone.
    """

    refused: str | None = None
    note: str = ""
    unless: tuple[str, ...] = ()
    beside: Axis | None = None


@attrs.frozen(kw_only=True)
class Row:
    """One axis: its name for people, what stands for ``{n}`` where there is no number, and a cell for each way."""

    axis: Axis
    title: str
    stands_for: str = "N"
    gathered: Cell = Cell()
    rank_local: Cell = Cell()
    checkpoint: Cell = Cell()
    store: Cell = Cell()

    def cell(self, way: Way) -> Cell:
        """What the table says of the way."""
        cell: Cell = getattr(self, way.value)
        return cell


#: Methods whose weights and scales are plain tensors of final values as soon as the model is loaded.
FINAL_METHODS = ("fp8_per_tensor",)
_APART = "one request runs on {n} ranks that are in {n} gather groups, which agree on their waves each for itself"
_OWN = Cell(note="a rank streams what it holds")
_IF_COVERED = Cell(note="where the files hold exactly what the rank holds")

TABLE = (
    Row(
        axis=Axis.DATA_PARALLEL,
        title="data parallel",
        gathered=Cell(note="the data-parallel ranks gather"),
        rank_local=Cell(note="every rank copies whole blocks"),
        store=Cell(note="all ranks of a node share an entry"),
    ),
    Row(
        axis=Axis.SEQUENCE_PARALLEL,
        title="sequence parallel",
        gathered=Cell(
            refused=_APART,
            note="the sequence-parallel ranks gather; every request has to reach all of them",
            beside=Axis.DATA_PARALLEL,
        ),
        rank_local=Cell(note="every rank copies whole blocks"),
        store=Cell(note="all ranks of a node share an entry, one for each set of sizes"),
    ),
    Row(
        axis=Axis.TENSOR_PARALLEL,
        title="tensor parallel",
        gathered=Cell(refused=_APART),
        rank_local=Cell(note="from the module, or from the entry of the rank's coordinate"),
        checkpoint=Cell(refused="each of {n} tensor-parallel ranks holds a part of what the files hold"),
        store=Cell(note="an entry for each tensor-parallel rank, which has to be said"),
    ),
    Row(
        axis=Axis.HSDP,
        title="HSDP",
        gathered=Cell(refused="HSDP has sharded the parameters already, and gathering would shard them a second time"),
        rank_local=Cell(note="from the module, where its parameters are plain tensors; HSDP does its own gathering"),
        checkpoint=Cell(refused="HSDP shards the parameters after loading"),
        store=Cell(refused="HSDP shards parameters after loading, so no rank holds whole ones"),
    ),
    Row(
        axis=Axis.CFG_PARALLEL,
        title="CFG parallel",
        gathered=Cell(refused=_APART),
        rank_local=_OWN,
        store=Cell(refused="{n} ranks hold different guidance branches"),
    ),
    Row(
        axis=Axis.PIPELINE_PARALLEL,
        title="pipeline parallel",
        gathered=Cell(refused=_APART),
        rank_local=_OWN,
        checkpoint=_IF_COVERED,
        store=Cell(refused="{n} ranks hold different stages"),
    ),
    Row(
        axis=Axis.EXPERT_PARALLEL,
        title="expert parallel",
        gathered=Cell(refused="{n} ranks hold different experts, so their slices are not of one image"),
        rank_local=_OWN,
        checkpoint=_IF_COVERED,
        store=Cell(refused="{n} ranks hold different experts"),
    ),
    Row(
        axis=Axis.ONLINE_QUANTIZATION,
        title="online quantization",
        stands_for="of any method",
        gathered=Cell(
            refused="the online quantization {n} may keep weights or scales that are not final after loading",
            note="its weights and scales are plain, final tensors; they come from the module",
            unless=FINAL_METHODS,
        ),
        rank_local=Cell(note="from the module, where its parameters are plain tensors"),
        checkpoint=Cell(refused="the online quantization {n} converts the weights while they load"),
        store=Cell(refused="the online quantization {n} converts weights while they load"),
    ),
)


@attrs.frozen(kw_only=True)
class Parallelism:
    """How a model is spread over ranks and converted: the number of ranks on each axis, and the two other axes."""

    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    cfg_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    hsdp: bool = False
    online_quantization: str | None = None

    @classmethod
    def of(cls, topology: WeightTopology, *, data_parallel_size: int = 1) -> Parallelism:
        """What ``topology`` says, which leaves the data-parallel size out."""
        names = [field.name for field in attrs.fields(cls) if field.name != "data_parallel_size"]
        return cls(data_parallel_size=data_parallel_size, **{name: getattr(topology, name) for name in names})

    def extent(self, axis: Axis) -> str | None:
        """What stands for ``{n}`` in a cell of the axis; None: the axis is not in use."""
        if axis is Axis.HSDP:
            return "HSDP" if self.hsdp else None
        if axis is Axis.ONLINE_QUANTIZATION:
            return None if self.online_quantization is None else repr(self.online_quantization)
        size = getattr(self, f"{axis.value}_size")
        return str(size) if size > 1 else None


def refusals(parallelism: Parallelism, way: Way) -> Iterator[tuple[Row, str]]:
    """The rows of the table that refuse ``way``, in the table's order, each with its reason."""
    for row in TABLE:
        cell, extent = row.cell(way), parallelism.extent(row.axis)
        if extent is None or cell.refused is None:
            continue
        if cell.beside is not None and parallelism.extent(cell.beside) is None:
            continue
        if row.axis is not Axis.ONLINE_QUANTIZATION or parallelism.online_quantization not in cell.unless:
            yield row, cell.refused.format(n=extent)


def gather_problems(parallelism: Parallelism) -> list[str]:
    """Why ranks cannot gather a model that is spread like this, every reason with what it is about; []: they can."""
    return [f"gathering with {row.title}: {reason}" for row, reason in refusals(parallelism, Way.GATHERED)]


def check_parallelism(parallelism: Parallelism, *, gathered: bool) -> None:
    """Return if blocks can be streamed this way; ``gathered`` False: every rank copies whole blocks.

    :raises ConfigurationError: if the table refuses it; with every reason.
    """
    if gathered:
        problems = [f"{problem}; set ranks={{'gather': 'never'}}" for problem in gather_problems(parallelism)]
    else:
        problems = [f"streaming with {row.title}: {reason}" for row, reason in refusals(parallelism, Way.RANK_LOCAL)]
    if problems:
        raise ConfigurationError(problems)
