"""What the store cannot hold, seen before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from streamflow.host_weights.errors import NotStorableError
from streamflow.host_weights.load_inputs import UNREPEATABLE_FORMATS, LoadInputs
from streamflow.ranks.matrix import Axis, Parallelism, Way, refusals
from streamflow.store.codes import StoreCode
from streamflow.weights.topology import WeightTopology

#: What each axis is called that rules the store out.
_CODES = {
    Axis.HSDP: StoreCode.UNSUPPORTED_HSDP,
    Axis.CFG_PARALLEL: StoreCode.UNSUPPORTED_CFG_PARALLEL,
    Axis.PIPELINE_PARALLEL: StoreCode.UNSUPPORTED_PP,
    Axis.EXPERT_PARALLEL: StoreCode.UNSUPPORTED_EXPERT_PARALLEL,
    Axis.ONLINE_QUANTIZATION: StoreCode.UNSUPPORTED_QUANTIZATION,
}
#: Packages whose modules hold quantized weights in forms of their own.
_QUANTIZING_PACKAGES = ("bitsandbytes", "torchao", "optimum", "auto_gptq", "gptqmodel", "awq", "hqq", "eetq", "aqlm")
#: Attributes by which libraries mark a quantized model.
_QUANTIZED_MARKS = ("hf_quantizer", "is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit", "quantization_method")


def check_topology(topology: WeightTopology, inputs: LoadInputs) -> None:
    """Return if weights that are spread and loaded this way can be stored and found again.

    :raises NotStorableError: if not, with the code.
    """
    for code, problem in _topology_problems(topology, inputs):
        raise NotStorableError(code, "the model", problem)


def _topology_problems(topology: WeightTopology, inputs: LoadInputs) -> Iterator[tuple[StoreCode, str]]:
    if inputs.load_format in UNREPEATABLE_FORMATS:
        yield StoreCode.UNSUPPORTED_LOAD_FORMAT, f"{inputs.load_format!r} weights have no identity to find them by"
    for row, reason in refusals(Parallelism.of(topology), Way.STORE):
        yield _CODES[row.axis], reason
    if topology.tensor_parallel_size > 1 and topology.tensor_parallel_rank is None:
        ranks = topology.tensor_parallel_size
        yield StoreCode.PARALLEL_RANK_UNAVAILABLE, f"which of the {ranks} tensor-parallel ranks this is was not said"


def check_not_quantized(model: nn.Module) -> None:
    """Return if no part of ``model`` is marked as quantized or comes from a library that quantizes.

    :raises NotStorableError: if one does.
    """
    for path, module in model.named_modules():
        mark = _quantization_of(module)
        if mark is not None:
            where = path or type(model).__name__
            raise NotStorableError(StoreCode.UNSUPPORTED_QUANTIZATION, where, f"it is quantized ({mark})")


def _quantization_of(module: nn.Module) -> str | None:
    package = type(module).__module__.partition(".")[0]
    if package in _QUANTIZING_PACKAGES:
        return package
    config = vars(module).get("config")
    if getattr(config, "quantization_config", None) is not None:
        return "config.quantization_config"
    return next((mark for mark in _QUANTIZED_MARKS if vars(module).get(mark)), None)
