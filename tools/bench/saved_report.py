"""A benchmark's report that grows: whoever ends it early keeps what there is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class SavedReport:
    """``values`` as JSON; the file at ``path`` (None: there is none) is one whole object after every change."""

    path: Path | None
    values: dict[str, Any] = attrs.field(factory=dict)

    def set(self, **values: Any) -> None:
        """Have these values, and save."""
        self.values.update(values)
        self.save()

    def add(self, name: str, value: Any) -> None:
        """Append ``value`` to the list of this name, and save."""
        self.values[name].append(value)
        self.save()

    def save(self) -> None:
        """Replace the file.

        :raises OSError: if it cannot be written.
        """
        if self.path is None:
            return
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        unfinished.write_text(json.dumps(self.values, indent=2) + "\n")
        os.replace(unfinished, self.path)
