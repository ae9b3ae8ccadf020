"""The options of an offload: each validated, all problems in one error, unknown ones refused."""

from __future__ import annotations

import difflib
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import attrs
import torch

from streamflow import dlo_options
from streamflow.errors import ConfigurationError
from streamflow.pipelines.policy import checked_policy
from streamflow.plan import OffloadPlan
from streamflow.ranks.options import RankOptions
from streamflow.store.errors import StoreOptionsError
from streamflow.store.options import StoreOptions
from streamflow.weights.topology import WeightTopology

Transfer = Literal["auto", "direct", "staged"]
ResidentPlacement = Literal["spread", "leading"]
StoreMode = Literal["disabled", "preferred", "required"]
CloseMode = Literal["cut", "drain"]
WarmUpFailure = Literal["error", "warn"]
#: ``resident_blocks`` for: every block.
ALL = "all"
#: Options that are on or off.
BOOLEANS = ("pin_host_memory", "remap_after_publish", "poison_freed_slots")
#: Events of a trace that are kept where nothing else was said.
DEFAULT_TRACE_EVENTS = 100_000
#: Metadata of an option that is a group of options: its class, which a mapping may describe.
GROUP = "group"
#: More places than this would leave too few of the 32 streams that torch has for a device to copies and to others.
MAX_PLACES = 24


def default_packing_threads() -> int:
    """Threads that pack pageable memory: all cores but the two of the loop and the compute thread, 1 to 10.

    Measured on 16 cores: more threads pack faster alone, but then contend with the compute thread for the interpreter.
    """
    return max(1, min(10, len(os.sched_getaffinity(0)) - 2))


@attrs.frozen(kw_only=True)
class OffloadConfig:
    """How a model is streamed. Frozen; every field is an option.

    Attributes:
        window_blocks: device slots of the window, at least 1; 2 hides the transfer behind the compute.
        resident_blocks: blocks that stay on the device: a number, ``"all"``, or None for none (or as many as
            ``resident_bytes`` allows). Only blocks that the plan calls resident-eligible count.
        resident_bytes: device bytes that resident blocks may take; None: no byte limit.
        resident_placement: ``"spread"`` puts residents evenly between streamed blocks, which keeps the link busy while
            they compute; those that ``resident_bytes`` alone allows where blocks are large, so that the rest streams
            evenly. ``"leading"`` takes the first ones.
        transfer: ``"direct"`` needs page-locked memory or a host device, ``"staged"`` packs from pageable memory;
            ``"auto"`` takes direct where it can.
        pin_host_memory: page-lock what blocks are streamed from, so that the transfer can be direct: the mapped files
            of a checkpoint, or private images of a loaded module, of exactly their size. False streams staged from
            pageable memory. Without effect on a host device.
        host_registration_limit_bytes: mapped files are page-locked only if they take no more than this; None: no limit,
            0: never. Private images of a module do not count.
        registration_piece_bytes: how much of a mapped file is page-locked in one call, at least a page; opening can be
            cancelled between two of them.
        probe_deadline_s: how long a child process may take to try whether this machine can page-lock mapped files.
        packing_threads: threads of the staged transfer; None: by the number of cores, at most 10.
        staging_chunk_bytes: what one packing thread packs and copies at a time; each thread has two buffers of it.
        run_ahead_blocks: how far, in blocks, the host may run ahead of the device; None: 2 x window + 2.
        device: where blocks compute, e.g. ``"cuda:0"`` or ``"cpu"``; None: cuda where there is one, else cpu.
        plan: the stacks and their residents, declared; None: taken from the model or discovered.
        components: which encoders, VAEs and other parts of a pipeline may do what it declares of them (True), and which
            stay on the device whole (False), by name, with an optional ``"default"``; None: all as declared.
        device_budget_bytes: device bytes that weights may take altogether: window, residents, what is always there, and
            components while they are used; None: no limit. Activations are not in it.
        topology: how the weights are spread over ranks and converted, as far as it decides whether a checkpoint can be
            streamed as it lies in its files, and which stored weights are this rank's.
        store_mode: ``"disabled"`` never looks at the host weight store. ``"preferred"`` takes an entry that is there,
            else loads, publishes and uses the entry; where the store fails it goes on without. ``"required"`` takes an
            entry that is there, or fails.
        remap_after_publish: a model that was loaded shows the entry from then on and drops its own copies; False keeps
            them, and streams from them.
        store: where the store is and how it behaves.
        ranks: how several ranks share transfers and form waves. It takes effect with ``open_offload(..., ranks=...)``.
        max_running_requests: requests that may run at once, each in a thread and on a stream of its own. 1 serves one
            request after the other. The default of 4: with transfers two to three times as long as computing (the usual
            case of a streamed model), that many passes hide the link; each takes the memory of its activations.
        max_passes_per_walk: passes that may share a walk, no more than requests may run; None: all of them.
        max_waiting_requests: requests that may wait for others to end; one more is refused at once.
        stateful_modules: paths of modules that keep something between calls: one request at a time may use the model
            then. None: they are looked for, by what is known of them and by what the first two forwards change, which
            run alone. ``()``: there are none.
        admission_window_s: how long the first pass that waits for a walk waits for others to join it, in seconds. Those
            who are about to come back from a pass are waited for anyhow.
        close_mode: what closing does with the requests that run and wait: ``"cut"`` stops them at their next block,
            ``"drain"`` serves them first.
        close_deadline_s: how long ``"drain"`` may take before it cuts, in seconds. The default leaves five of the
            thirty seconds that container managers usually grant.
        trace_path: where to write a trace of what the engine did, on closing and on a failure; a name that ends with
            ``.gz`` compresses it. Each rank needs one of its own. None: no file, and no trace but for ``trace_events``.
        trace_events: how many events are kept, the newest, each about 400 bytes of host memory; a walk takes about ten
            for each block. None: 100,000 if there is a ``trace_path``, else none, which costs nothing.
        warmup_failure: what a warm-up that fails does at opening: ``"error"`` raises, ``"warn"`` logs and goes on.
        poison_freed_slots: fill a slot before it is refilled; for tests.

    :raises ConfigurationError: if an option or a combination is not usable; it lists every problem.
    :raises ComponentPolicyTypeError: if ``components`` is no mapping of names to booleans.
    """

    window_blocks: int = 2
    resident_blocks: int | Literal["all"] | None = None
    resident_bytes: int | None = None
    resident_placement: ResidentPlacement = "spread"
    transfer: Transfer = "auto"
    pin_host_memory: bool = True
    host_registration_limit_bytes: int | None = None
    registration_piece_bytes: int = 1 << 30
    probe_deadline_s: float = 20.0
    packing_threads: int | None = None
    staging_chunk_bytes: int = 8 << 20
    run_ahead_blocks: int | None = None
    device: str | torch.device | None = None
    plan: OffloadPlan | None = None
    components: Mapping[str, bool] | None = attrs.field(default=None, converter=checked_policy, hash=False)
    device_budget_bytes: int | None = None
    topology: WeightTopology = attrs.field(factory=WeightTopology, metadata={GROUP: WeightTopology})
    store_mode: StoreMode = "disabled"
    remap_after_publish: bool = True
    store: StoreOptions = attrs.field(factory=StoreOptions, metadata={GROUP: StoreOptions})
    ranks: RankOptions = attrs.field(factory=RankOptions, metadata={GROUP: RankOptions})
    max_running_requests: int = 4
    max_passes_per_walk: int | None = None
    max_waiting_requests: int = 1000
    stateful_modules: tuple[str, ...] | None = None
    admission_window_s: float = 0.0
    close_mode: CloseMode = "cut"
    close_deadline_s: float = 25.0
    trace_path: str | os.PathLike[str] | None = None
    trace_events: int | None = None
    warmup_failure: WarmUpFailure = "error"
    poison_freed_slots: bool = False

    def __attrs_post_init__(self) -> None:
        problems = [*self._take_groups(), *_problems(self)]
        if problems:
            raise ConfigurationError(problems)

    def _take_groups(self) -> Iterator[str]:
        """Let mappings become the groups of options that they describe; yields what is wrong with them."""
        for field in attrs.fields(type(self)):
            group, value = field.metadata.get(GROUP), getattr(self, field.name)
            if group is None or isinstance(value, group):
                continue
            if not isinstance(value, Mapping):
                yield f"{field.name} must be a {group.__name__} or a mapping of its options, not {value!r}"
                continue
            try:
                _check_known(value, _names(group))
                object.__setattr__(self, field.name, group(**value))
            except (ConfigurationError, StoreOptionsError) as failure:
                yield from (f"{field.name}: {problem}" for problem in failure.problems)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> OffloadConfig:
        """The configuration with these options, the rest at their defaults.

        :raises ConfigurationError: if an option is unknown (the nearest name is suggested) or not usable.
        """
        _check_known(options, _names(cls))
        return cls(**options)

    @classmethod
    def from_dlo_options(cls, options: Mapping[str, Any]) -> OffloadConfig:
        """The configuration that does what these options of vLLM-Omni's distributed layerwise offload ask for there.

        What an option left out means, and which of them go together, is as it is there. ``dlo_use_allgather=True`` is
        ``gather="always"``, which needs ``open_offload(..., ranks=...)``, False is ``"never"``. Left out, it counts as
        True for what goes together, and ranks gather where they can. Sizes are in GiB, times in seconds;
        ``dlo_runtime_cache_pin_limit_gib`` 0 is off and ``dlo_host_registration_limit_gib`` 0 is no ceiling.

        :raises ConfigurationError: if an option is unknown (the nearest name is suggested), not usable, or cannot be
            done here; it lists every problem.
        :raises ComponentPolicyTypeError: if ``dlo_offload_components`` is no mapping of names to booleans, nor None.
        """
        _check_known(options, list(dlo_options.DEFAULTS))
        return cls(**dlo_options.translated(options))

    def effective(self) -> dict[str, Any]:
        """Every option with its default filled in, in plain values fit for printing and JSON."""
        values = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        values["device"] = str(self.torch_device())
        values["packing_threads"] = self.effective_packing_threads
        values["trace_path"] = None if self.trace_path is None else os.fspath(self.trace_path)
        values["trace_events"] = self.effective_trace_events
        if self.run_ahead_blocks is None:
            values["run_ahead_blocks"] = 2 * self.window_blocks + 2
        values["max_passes_per_walk"] = self.effective_passes_per_walk
        values["plan"] = None if self.plan is None else attrs.asdict(self.plan)
        values |= {name: attrs.asdict(values[name]) for name in ("topology", "store", "ranks")}
        return values

    @property
    def effective_packing_threads(self) -> int:
        """``packing_threads`` with its default filled in."""
        return default_packing_threads() if self.packing_threads is None else self.packing_threads

    @property
    def effective_passes_per_walk(self) -> int:
        """``max_passes_per_walk`` with its default filled in."""
        return self.max_running_requests if self.max_passes_per_walk is None else self.max_passes_per_walk

    @property
    def effective_trace_events(self) -> int | None:
        """``trace_events`` with its default filled in; None: no trace."""
        if self.trace_events is None and self.trace_path is not None:
            return DEFAULT_TRACE_EVENTS
        return self.trace_events

    def torch_device(self) -> torch.device:
        """``device`` with its default filled in."""
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def _names(group: type[attrs.AttrsInstance]) -> list[str]:
    return [field.name for field in attrs.fields(group)]


def _check_known(options: Mapping[str, Any], known: list[str]) -> None:
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigurationError([_unknown(name, known) for name in unknown])


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    meant = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
    return f"there is no option {name!r}; {meant}"


def _problems(config: OffloadConfig) -> list[str]:
    found = [
        _not_an_int("window_blocks", config.window_blocks, minimum=1),
        _not_an_int("staging_chunk_bytes", config.staging_chunk_bytes, minimum=256),
        _not_an_int("packing_threads", config.packing_threads, minimum=1, optional=True),
        _not_an_int("run_ahead_blocks", config.run_ahead_blocks, minimum=1, optional=True),
        _not_an_int("trace_events", config.trace_events, minimum=1, optional=True),
        _not_a_path("trace_path", config.trace_path),
        _not_an_int("resident_bytes", config.resident_bytes, minimum=0, optional=True),
        _not_an_int("host_registration_limit_bytes", config.host_registration_limit_bytes, minimum=0, optional=True),
        _not_an_int("registration_piece_bytes", config.registration_piece_bytes, minimum=mmap.PAGESIZE),
        _not_a_duration("probe_deadline_s", config.probe_deadline_s),
        _not_an_int("device_budget_bytes", config.device_budget_bytes, minimum=1, optional=True),
        None if config.resident_blocks == ALL else _not_resident_count(config.resident_blocks),
        _not_one_of("resident_placement", config.resident_placement, get_args(ResidentPlacement)),
        _not_one_of("transfer", config.transfer, get_args(Transfer)),
        _not_one_of("store_mode", config.store_mode, get_args(StoreMode)),
        *(_not_a_bool(name, getattr(config, name)) for name in BOOLEANS),
        _not_an_int("max_waiting_requests", config.max_waiting_requests, minimum=0),
        *_walk_problems(config),
        _not_paths("stateful_modules", config.stateful_modules),
        *(_not_seconds(name, getattr(config, name)) for name in ("admission_window_s", "close_deadline_s")),
        _not_one_of("close_mode", config.close_mode, get_args(CloseMode)),
        _not_one_of("warmup_failure", config.warmup_failure, get_args(WarmUpFailure)),
        _not_a_plan(config.plan),
        *_device_problems(config),
    ]
    return [problem for problem in found if problem is not None]


def _not_an_int(name: str, value: Any, *, minimum: int, optional: bool = False) -> str | None:
    if optional and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} must be an integer{' or None' if optional else ''}, not {value!r}"
    return f"{name} is {value} but must be at least {minimum}" if value < minimum else None


def _walk_problems(config: OffloadConfig) -> list[str | None]:
    places, passes = config.max_running_requests, config.max_passes_per_walk
    problems = [
        _not_an_int("max_running_requests", places, minimum=1),
        _not_an_int("max_passes_per_walk", passes, minimum=1, optional=True),
    ]
    if not any(problems):
        if places > MAX_PLACES:
            problems.append(f"max_running_requests is {places} but may be at most {MAX_PLACES}: each needs a stream")
        if passes is not None and passes > places:
            problems.append(f"max_passes_per_walk is {passes} but only max_running_requests={places} can have a pass")
    return problems


def _not_seconds(name: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} must be a number of seconds, not {value!r}"
    return None if 0 <= value < math.inf else f"{name} is {value} but must be 0 or more seconds"


def _not_a_duration(name: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} must be a number of seconds, not {value!r}"
    return None if 0 < value < math.inf else f"{name} is {value} but must be positive and finite"


def _not_paths(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, tuple) and all(isinstance(path, str) for path in value)):
        return None
    return f"{name} must be a tuple of module paths or None, not {value!r}"


def _not_resident_count(value: Any) -> str | None:
    problem = _not_an_int("resident_blocks", value, minimum=0, optional=True)
    return problem if problem is None else f"{problem} (or {ALL!r})"


def _not_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str | None:
    return None if value in allowed else f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}"


def _not_a_bool(name: str, value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{name} must be True or False, not {value!r}"


def _not_a_path(name: str, value: Any) -> str | None:
    is_path = value is None or (isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str))
    return None if is_path and value != "" else f"{name} must be a path or None, not {value!r}"


def _not_a_plan(value: Any) -> str | None:
    return None if value is None or isinstance(value, OffloadPlan) else f"plan must be an OffloadPlan, not {value!r}"


def _device_problems(config: OffloadConfig) -> list[str | None]:
    try:
        device = config.torch_device()
    except (RuntimeError, TypeError) as failure:
        return [f"device {config.device!r} is not a device that torch knows: {failure}"]
    if device.type not in ("cpu", "cuda"):
        return [f"device {device} is not supported: use 'cpu', 'cuda' or 'cuda:N'"]
    if device.type == "cuda":
        return [_cuda_problem(device), _direct_problem(config)]
    return []


def _cuda_problem(device: torch.device) -> str | None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        return f"device {device} is not there: torch sees {count} CUDA devices; use device='cpu' or fix the driver"
    return None


def _direct_problem(config: OffloadConfig) -> str | None:
    if config.transfer == "direct" and not config.pin_host_memory:
        return "transfer='direct' needs page-locked memory, which pin_host_memory=False forbids"
    return None
