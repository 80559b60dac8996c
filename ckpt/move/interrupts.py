"""Ctrl-C during clean-up: the step that has begun is finished before the interrupt is raised."""

from __future__ import annotations

from collections.abc import Callable


def uninterrupted(step: Callable[[], None]) -> None:
    """Call ``step`` until it ends. After a Ctrl-C it is called again, and the interrupt is raised
    at the end."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            step()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
