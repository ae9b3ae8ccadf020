"""Errors of the weights on the host. Each refines the nearest builtin and carries what it speaks of as fields."""

from __future__ import annotations

from streamflow.stages.errors import StreamflowError


class CheckpointNotFoundError(StreamflowError, FileNotFoundError):
    """A checkpoint, or a file that belongs to it, is not there."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class CheckpointOpenError(StreamflowError, OSError):
    """A checkpoint file is there but cannot be opened or is not a regular file."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class CheckpointFormatError(StreamflowError, ValueError):
    """A safetensors file, or the index of a sharded checkpoint, breaks a rule of its format."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class CheckpointAmbiguousError(StreamflowError, ValueError):
    """A directory holds several checkpoints and nothing says which one is meant."""

    def __init__(self, path: str, candidates: tuple[str, ...]) -> None:
        self.path, self.candidates = path, candidates
        super().__init__(
            f"{path} holds several checkpoints: {', '.join(candidates)}; give the path of one of these files instead"
        )


class CheckpointInUseError(StreamflowError, BufferError):
    """A checkpoint file cannot be closed yet: memory or threads still depend on it. It stays open and usable."""

    def __init__(self, path: str, user: str) -> None:
        self.path, self.user = path, user
        super().__init__(f"{path} cannot be closed while {user}; end those first, then close it again")


class CheckpointClosedError(StreamflowError, ValueError):
    """A checkpoint file was used after it was closed."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} is closed; open the checkpoint again")


class DtypeUnavailableError(StreamflowError, TypeError):
    """The installed torch has no such element type."""

    def __init__(self, dtype: str, torch_version: str) -> None:
        self.dtype, self.torch_version = dtype, torch_version
        super().__init__(f"torch {torch_version} has no dtype {dtype!r}; a newer torch may have it")


class AdapterError(StreamflowError, ValueError):
    """A checkpoint adapter could not make the tensor that the module needs; ``target`` is that tensor's name."""

    def __init__(self, adapter: str, target: str, reason: str) -> None:
        self.adapter, self.target, self.reason = adapter, target, reason
        super().__init__(f"the checkpoint adapter {adapter} could not make {target!r}: {reason}")


class CheckpointRegionError(StreamflowError, ValueError):
    """A region of a block image cannot be filled from a checkpoint; ``names`` are the tensors that share it."""

    def __init__(self, names: tuple[str, ...], reason: str) -> None:
        self.names, self.reason = names, reason
        super().__init__(f"{', '.join(names)}: {reason}; use the module source for this model")
