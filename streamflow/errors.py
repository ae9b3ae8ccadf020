"""Errors that users of the library meet, by who is at fault. The engine's own are in `streamflow.stages.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from streamflow.stages.errors import StreamflowError


class ConfigurationError(StreamflowError, ValueError):
    """Options that are wrong by themselves or together; ``problems`` has all of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("the offload configuration is not usable:" + "".join(f"\n- {text}" for text in problems))


class ComponentPolicyTypeError(StreamflowError, TypeError):
    """The ``components`` option is no mapping of names to booleans."""


class ComponentPolicyError(StreamflowError, ValueError):
    """The ``components`` option names what it cannot decide about; ``known`` are the names that it can."""

    def __init__(self, problem: str, known: Sequence[str]) -> None:
        self.problem, self.known = problem, tuple(known)
        super().__init__(f"{problem}; components may name: {', '.join((*known, 'default')) if known else 'nothing'}")


class PlanError(StreamflowError, ValueError):
    """No blocks can be streamed as asked; ``candidates`` are the paths that could have been meant."""

    def __init__(self, problem: str, candidates: Sequence[str] = ()) -> None:
        self.candidates = tuple(candidates)
        listed = f"; block lists in this model: {', '.join(candidates)}" if candidates else ""
        super().__init__(problem + listed)


class UnsupportedModelError(StreamflowError, TypeError):
    """Something in the model cannot be streamed exactly; ``name`` says where it is."""

    def __init__(self, name: str, reason: str, fix: str) -> None:
        self.name, self.reason, self.fix = name, reason, fix
        super().__init__(f"{name}: {reason}; {fix}")


class AlreadyAttachedError(StreamflowError, RuntimeError):
    """The module, or a part of it, is streamed by an offload already."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} is attached to an open offload already; close that one first")


class RefusedWhileAttachedError(StreamflowError, RuntimeError):
    """An operation that would read or write weights which are not there while the module is streamed.

    ``instead`` is what to do; None: the same, before opening the offload or after closing it.
    """

    def __init__(self, operation: str, name: str, instead: str | None = None) -> None:
        self.operation, self.name, self.instead = operation, name, instead
        advice = (
            "most of its weights are not on the device; do it before opening the offload or after closing it "
            "(state_dict() works at any time)"
        )
        super().__init__(f"{operation} of {name} is refused while it is streamed: {instead or advice}")


class WeightsChangedError(StreamflowError, RuntimeError):
    """A streamed tensor was written or replaced while attached: the change would be lost with its slot."""

    def __init__(self, name: str, how: str) -> None:
        self.name, self.how = name, how
        super().__init__(
            f"{name} was {how} while it is streamed, which would be lost with its slot; change weights before "
            "opening the offload, or keep them outside of the streamed blocks (non-persistent buffers are)"
        )


class GradientError(StreamflowError, RuntimeError):
    """A streamed block was entered with gradients enabled: its weights would be gone before the backward."""

    def __init__(self, block: str) -> None:
        self.block = block
        super().__init__(
            f"{block} is streamed and was called with gradients enabled and something that requires them; its slot "
            "is reused before a backward could run: call the model under torch.no_grad() or torch.inference_mode()"
        )


class WarmUpError(StreamflowError, RuntimeError):
    """The warm-up of ``model`` failed, or cannot be done."""

    def __init__(self, model: str, problem: str) -> None:
        self.model, self.problem = model, problem
        super().__init__(
            f"the warm-up of {model} failed: {problem}; change the recipe, open with warmup=None, or with "
            "warmup_failure='warn' to go on all the same"
        )


class DeviceBudgetError(StreamflowError, ValueError):
    """A component does not fit into the device budget beside what is always on the device."""

    def __init__(self, component: str, nbytes: int, always: int, budget: int) -> None:
        self.component, self.nbytes, self.always, self.budget = component, nbytes, always, budget
        super().__init__(
            f"{component} takes {nbytes:,} bytes, and window, residents and fixed tensors take {always:,}: together "
            f"more than device_budget_bytes={budget:,}; raise it, use fewer window_blocks or resident blocks, or "
            "stream an encoder's blocks (OffloadPlan(encoder_stacks=...))"
        )


class NestedPassError(StreamflowError, RuntimeError):
    """A streamed component was called inside another streamed one: both would need the window at once."""

    def __init__(self, component: str, inside: str) -> None:
        self.component, self.inside = component, inside
        super().__init__(
            f"{component} was called inside a forward of {inside}, and both stream their blocks; call one after the "
            f"other, or keep {component} on the device (components={{'{component}': False}})"
        )


class BlocksBypassedError(StreamflowError, RuntimeError):
    """A forward computed with the weights of streamed blocks without calling the blocks: they were not there."""

    def __init__(self, component: str, num_blocks: int) -> None:
        self.component, self.num_blocks = component, num_blocks
        super().__init__(
            f"a forward of {component} gave NaN and called none of its {num_blocks} streamed blocks; it seems to call "
            "parts of them, whose weights are only there while their block is called: name what it does call in "
            "OffloadPlan(stacks=...)"
        )


class LoopThreadError(StreamflowError, RuntimeError):
    """A forward was called on the event loop's own thread, which has to stay free to move the blocks."""

    def __init__(self, component: str) -> None:
        self.component = component
        super().__init__(
            f"{component} was called on the thread of the offload's event loop, which would wait for itself; "
            "use `await offload.run(model, ...)`, or `with streamflow.offload(model)` where there is no loop"
        )


class OverloadedError(StreamflowError, RuntimeError):
    """A request was refused at once: ``running`` and ``waiting`` requests are there, and ``limit`` may wait."""

    def __init__(self, running: int, waiting: int, limit: int) -> None:
        self.running, self.waiting, self.limit = running, waiting, limit
        super().__init__(
            f"{running} requests run and {waiting} wait, and no more than {limit} may wait; ask again later, or raise "
            "max_waiting_requests (a longer queue) or max_running_requests (more activations on the device)"
        )


class DeadlineExceededError(StreamflowError, TimeoutError):
    """A request was not done ``deadline_s`` seconds after it was made; ``phase``: it was ``waiting`` or ``running``."""

    def __init__(self, request_id: str, deadline_s: float, phase: str) -> None:
        self.request_id: str | None = request_id
        self.deadline_s, self.phase = deadline_s, phase
        super().__init__(
            f"request {request_id!r} was still {phase} at its deadline of {deadline_s:g} s; give it a later deadline, "
            "or admit fewer requests (max_waiting_requests)"
        )


class RequestReusedError(StreamflowError, RuntimeError):
    """A request was run a second time; ``request_id`` names it."""

    def __init__(self, request_id: str) -> None:
        self.request_id: str | None = request_id
        super().__init__(f"request {request_id!r} was run already; make another one with offload.request()")


class ForkedOffloadError(StreamflowError, RuntimeError):
    """An offload that process ``opened_by`` opened was used in ``used_by``, which was forked from it."""

    def __init__(self, opened_by: int, used_by: int) -> None:
        self.opened_by, self.used_by = opened_by, used_by
        super().__init__(
            f"the offload was opened by process {opened_by} and is used by process {used_by}, which was forked from it "
            "and has none of its threads; open the offload after forking, or start workers with 'spawn'"
        )


class ModelNameTakenError(StreamflowError, ValueError):
    """Two offloads were to have one name among the metrics; ``model`` is the name."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"the metrics of {model!r} are those of another offload; give each a name of its own")


class UnsuitableWorkError(StreamflowError, TypeError):
    """What was given to `Offload.run` cannot be called in a thread; ``work`` is its repr."""

    def __init__(self, work: object, problem: str) -> None:
        self.work, self.problem = repr(work), problem
        super().__init__(
            f"offload.run calls its argument in a thread of its own, but {self.work} {problem}; "
            "give it a plain function, e.g. `await offload.run(model, inputs)`"
        )


class CheckpointUnusableError(StreamflowError, ValueError):
    """A checkpoint can neither be streamed nor loaded; ``code`` and ``reason`` say why it cannot be streamed."""

    def __init__(self, path: str, code: str, reason: str, problem: str) -> None:
        self.path, self.code, self.reason, self.problem = path, code, reason, problem
        super().__init__(f"{path}: {problem}; it cannot be streamed directly either ({code}: {reason})")


class DiffusersUnavailableError(StreamflowError, ImportError):
    """The diffusers library is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "diffusers is needed to build its models; pip install 'streamflow-offload[diffusers]'", name="diffusers"
        )


class HostMemoryError(StreamflowError, MemoryError):
    """Host memory for the block images does not fit under the machine's or the cgroup's limit."""

    def __init__(self, wanted: int, available: int) -> None:
        self.wanted, self.available = wanted, available
        super().__init__(
            f"{wanted:,} bytes of page-locked host memory are needed and {available:,} are available; "
            "set pin_host_memory=False to stream from pageable memory"
        )
