"""Why the store did not serve or keep an entry, as codes for programs."""

from __future__ import annotations

from enum import StrEnum


class StoreCode(StrEnum):
    """Why the store did not serve or keep an entry."""

    UNSUPPORTED_LOAD_FORMAT = "unsupported_load_format"
    UNSUPPORTED_HSDP = "unsupported_hsdp"
    UNSUPPORTED_EXPERT_PARALLEL = "unsupported_expert_parallel"
    UNSUPPORTED_CFG_PARALLEL = "unsupported_cfg_parallel"
    UNSUPPORTED_PP = "unsupported_pp"
    UNSUPPORTED_QUANTIZATION = "unsupported_quantization"
    UNSUPPORTED_TENSOR = "unsupported_tensor"
    UNSUPPORTED_ALIAS = "unsupported_alias"
    AMBIGUOUS_OWNERSHIP = "ambiguous_ownership"
    PARALLEL_RANK_UNAVAILABLE = "parallel_rank_unavailable"
    IDENTITY_COLLISION = "identity_collision"
    LOCK_TIMEOUT = "lock_timeout"
    LOCK_FAILED = "lock_failed"
    INSUFFICIENT_DISK = "insufficient_disk"
    ENTRY_MISSING = "entry_missing"
    ENTRY_REJECTED = "entry_rejected"
    UNSUPPORTED_FILESYSTEM = "unsupported_filesystem"
    INVALID_CONFIGURATION = "invalid_configuration"
    OPERATION_FAILED = "operation_failed"
