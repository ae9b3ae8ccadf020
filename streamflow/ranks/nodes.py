"""Whether ranks are on one node: a value that each rank gives, and the check over all of them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from streamflow.ranks.errors import NodesDifferError
from streamflow.ranks.topology import GatherGroup

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@attrs.frozen
class Node:
    """``boot_id`` tells nodes apart, whatever they and the containers on them are called; "" where there is none."""

    hostname: str
    boot_id: str

    @property
    def name(self) -> str:
        """The node for people; different for different nodes."""
        return f"{self.hostname} (boot {self.boot_id.partition('-')[0]})" if self.boot_id else self.hostname

    def to_wire(self) -> dict[str, str]:
        """Plain values for JSON, which `check_one_node` reads."""
        return attrs.asdict(self)


def own_node() -> Node:
    """The node of this process."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return Node(platform.node(), boot_id)


def check_one_node(group: GatherGroup, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Return if all ranks of ``group`` are on one node; ``nodes`` has what each gave, by its index in the group.

    :raises NodesDifferError: if they are not.
    """
    places = [Node(**node) for node in nodes]
    ranks_by_node: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for rank, node in zip(group.ranks, places, strict=True):
        key = node.boot_id or node.hostname
        names.setdefault(key, node.name)
        ranks_by_node.setdefault(key, []).append(rank)
    if len(ranks_by_node) > 1:
        raise NodesDifferError({names[key]: ranks for key, ranks in ranks_by_node.items()})
