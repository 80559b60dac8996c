"""Ctrl-C while a run tidies up: what has begun is finished before the interrupt is raised."""

from __future__ import annotations

from collections.abc import Callable


def uninterrupted(step: Callable[[], None]) -> None:
    """Call ``step`` to its end; a Ctrl-C on the way begins it again and is raised afterwards."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            step()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
