"""What a caller of `open_streamed` asks for, and the steps from it to a model. Each blocks; for worker threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import attrs
from torch import nn

from streamflow.config import OffloadConfig
from streamflow.errors import CheckpointUnusableError
from streamflow.hardware import Hardware
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.weights.adapters import CheckpointAdapter, TransformAdapter
from streamflow.weights.checkpoint import Checkpoint
from streamflow.weights.checkpoint_plan import CheckpointFallback, CheckpointPlan, FallbackCode
from streamflow.weights.needed import needed_tensors, never_computed
from streamflow.weights.ordinary_loading import load_ordinarily
from streamflow.weights.preflight import preflight
from streamflow.weights.skeleton import build_skeleton
from streamflow.weights.source_matching import some


@attrs.frozen(kw_only=True, eq=False)
class ModelRequest:
    """A model by its checkpoint; see `open_streamed` for what each part means."""

    build: Callable[[], nn.Module]
    checkpoint_dir: str | os.PathLike[str]
    config: OffloadConfig
    load: Callable[[nn.Module], nn.Module] | None
    finalize: Callable[[nn.Module], object] | None
    adapters: tuple[CheckpointAdapter, ...]
    inputs: LoadInputs
    hardware: Hardware

    @property
    def custom_code(self) -> tuple[str, ...]:
        """The parts of the caller's code that take part in making weights, by the names of the arguments."""
        transforms = any(isinstance(adapter, TransformAdapter) for adapter in self.adapters)
        given = {"load=": self.load is not None, "finalize=": self.finalize is not None, "adapters=": transforms}
        return tuple(name for name, is_given in given.items() if is_given)

    def build_skeleton(self) -> nn.Module:
        """A new skeleton.

        :raises TypeError: if ``build`` returns no module.
        """
        return build_skeleton(self.build)

    def examine(self, skeleton: nn.Module, checkpoint: Checkpoint) -> CheckpointPlan | CheckpointFallback:
        """A plan only where the files and the skeleton together hold every value of the model."""
        needed, topology = needed_tensors(skeleton), self.config.topology
        answer = preflight(needed, checkpoint.entries, self.adapters, topology, same_bytes=checkpoint.same_bytes)
        problems = tuple(never_computed(skeleton))
        if isinstance(answer, CheckpointPlan) and problems:
            return CheckpointFallback(FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE, some(problems, "; "), problems)
        return answer

    def replaced(self, skeleton: nn.Module) -> frozenset[str]:
        """The names of tensors that are known to get other values than the skeleton computed: without ``load``, every
        parameter and persistent buffer is read from the files.
        """
        if self.load is not None:
            return frozenset()
        return frozenset(name for tensor in needed_tensors(skeleton) for name in tensor.names)

    def finished_skeleton(
        self, skeleton: nn.Module, checkpoint: Checkpoint
    ) -> tuple[nn.Module, CheckpointPlan | CheckpointFallback]:
        """The skeleton, finished, with the plan by which the files hold its weights; or one that is not finished, to be
        loaded, and why there is no plan. A plan is proven for what the model is in the end.
        """
        answer = self.examine(skeleton, checkpoint)
        if isinstance(answer, CheckpointFallback):
            return skeleton, answer
        self.finish(skeleton)
        if self.finalize is not None:
            answer = self.examine(skeleton, checkpoint)
        if isinstance(answer, CheckpointFallback):
            return self.build_skeleton(), answer
        return skeleton, answer

    def load_finished(self, skeleton: nn.Module, checkpoint: Checkpoint, fallback: CheckpointFallback) -> nn.Module:
        """The finished model with its weights, loaded the ordinary way.

        :raises CheckpointUnusableError: if that needs steps which only ``load`` could know.
        """
        model = self._load_into(skeleton, checkpoint, fallback)
        self.finish(model)
        return model

    def _load_into(self, skeleton: nn.Module, checkpoint: Checkpoint, fallback: CheckpointFallback) -> nn.Module:
        if self.load is not None:
            return self.load(skeleton)
        if self.adapters or fallback.code != FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE:
            problem = "its ordinary loading needs steps that streamflow does not know; pass load="
            raise CheckpointUnusableError(checkpoint.path, fallback.code, fallback.reason, problem)
        return load_ordinarily(skeleton, checkpoint, fallback)

    def finish(self, model: nn.Module) -> None:
        """Run the caller's last step, the same whichever way the weights come; ``eval()`` if there is none."""
        (self.finalize or nn.Module.eval)(model)
