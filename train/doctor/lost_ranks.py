"""Recognises errors of collectives that mean: another rank has ended, or did not arrive in time."""

from __future__ import annotations

import re

from ..errors import LOST_A_RANK, WAITED_TOO_LONG, LostRank

# What gloo and NCCL say when the process at the other end has ended, and when it is late.
_GONE = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")
_LATE = re.compile(r"Timed out waiting (\d+)ms|caught collective operation timeout")


def lost(error: BaseException, minutes: float, where: str = "") -> LostRank | None:
    """A LostRank if an error of a collective means that another rank is missing, else None.

    ``minutes`` is the time that a collective waits, ``where`` the step and phase of this rank.
    """
    text, at = str(error), f"{where}: " if where else ""
    late = _LATE.search(text)
    if late is not None:
        seconds = int(late[1]) / 1000 if late[1] else 60 * minutes
        waited = f"{seconds / 60:g} minutes" if seconds > 60 else f"{seconds:g} s"
        return LostRank(f"{at}waited {waited} for another rank ({late[0]})", WAITED_TOO_LONG)
    gone = _GONE.search(text)
    if gone is not None:
        return LostRank(f"{at}lost another rank ({gone[0]}), so it ends too", LOST_A_RANK)
    return None


def hang(minutes: float | None = None) -> str:
    """What to do if ranks waited for another one too long; lines, each after a line break."""
    longer = f"--timeout-minutes {3 * minutes:g}" if minutes else "a larger --timeout-minutes"
    fixes = (
        "look for the first error above: one rank may have failed while the others waited",
        "the rank that does not say this is the one that the others waited for: py-spy dump "
        "--pid PID shows where it is",
        f"a first step or a save that takes longer needs {longer}",
        "on several machines check the network: train-ckpt doctor on each, NCCL_DEBUG=INFO, and "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME where a host has several interfaces",
    )
    return "".join(f"\n  - {fix}" for fix in fixes)
