"""What a pipeline's class declares of its components, where the library that has the class is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging

import attrs

from streamflow.pipelines.discovery import EXCLUDED_ATTRIBUTE, SEQUENCE_ATTRIBUTE
from streamflow.pipelines.policy import Behaviour, Role
from streamflow.pipelines.roles import role_of

_LIBRARY = "diffusers"


@attrs.frozen
class DeclaredPipeline:
    """The order in which components run, and those that are not to be moved; both empty where nobody tells."""

    sequence: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def behaviour_of(self, name: str, kind: str | None, has_blocks: bool) -> str:
        """What the component does when the pipeline is opened: see `find_components`."""
        if name in self.excluded:
            return Behaviour.RESIDENT.value
        streams = has_blocks and role_of(name, kind or "", "") is Role.TRANSFORMER
        return (Behaviour.STREAMED if streams else Behaviour.STAGED).value

    def rank(self, name: str) -> int:
        """The component's place in the order; those that are not in it come last."""
        return self.sequence.index(name) if name in self.sequence else len(self.sequence)


def declared_by(class_name: str | None) -> DeclaredPipeline:
    """What the class of this name declares. Imports its library, which may take seconds."""
    if class_name is None or importlib.util.find_spec(_LIBRARY) is None:
        return DeclaredPipeline()
    logging.disable(logging.WARNING)  # what libraries say while they are imported is not about the plan
    try:
        found = getattr(importlib.import_module(_LIBRARY), class_name, None)
    finally:
        logging.disable(logging.NOTSET)
    sequence = str(getattr(found, SEQUENCE_ATTRIBUTE, None) or "")
    return DeclaredPipeline(
        tuple(name for name in sequence.split("->") if name), tuple(getattr(found, EXCLUDED_ATTRIBUTE, ()))
    )
