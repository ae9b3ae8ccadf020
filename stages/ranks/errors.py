"""What can go wrong among ranks."""

from __future__ import annotations

from collections.abc import Collection

from streamflow.stages.errors import StreamflowError
from streamflow.stages.ranks.signature import WaveSignature


class OutOfTurnError(StreamflowError, RuntimeError):
    """A pass in a wave needs what the ranks do not fetch now; nothing was fetched. The other requests go on.

    ``block`` is the number of the block, which its walk had already. ``request``: its name; None: a direct call.
    """

    def __init__(self, component: str, block: int, request: str | None) -> None:
        self.component, self.block, self.request = component, block, request
        who = "a direct call of the model" if request is None else f"{request!r}"
        super().__init__(
            f"{who} comes to block {block} of {component!r} out of turn: this walk has had it already, and the ranks "
            "gather each block once a walk. Run the blocks in their order, or use gather='never'"
        )


class SignatureMissingError(StreamflowError, ValueError):
    """A request needs the ranks to walk together, and did not say how often. ``request``: as in `OutOfTurnError`."""

    def __init__(self, component: str, request: str | None) -> None:
        self.component, self.request = component, request
        who = "a direct call of the model" if request is None else f"{request!r}"
        super().__init__(
            f"{who} walks over {component!r}, which the ranks gather together, but says not for how many steps: use "
            f"offload.request(wave=WaveSignature(steps=(({component!r}, 30),))), or the option default_wave"
        )


class WaveComponentsError(StreamflowError, ValueError):
    """A request's wave does not begin with the component that it walks over, or names one that is not gathered."""

    def __init__(
        self, request: str | None, component: str, signature: WaveSignature, gathered: Collection[str]
    ) -> None:
        self.request, self.component, self.signature = request, component, signature
        self.gathered = tuple(sorted(gathered))
        super().__init__(
            f"{request!r} begins with {component!r}, but its wave has the steps {signature.steps}; the ranks gather "
            f"{', '.join(self.gathered)}"
        )
