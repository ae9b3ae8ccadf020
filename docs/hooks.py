"""What MkDocs calls while it builds the site."""

from __future__ import annotations

from typing import Any

from docsite.markers import filled


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with what is made from the code in it."""
    return filled(markdown)
