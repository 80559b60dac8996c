"""Which address and interface of this machine lead to another one."""

from __future__ import annotations

import fcntl
import socket
import struct

from ..errors import TrainError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def local_address(host: str) -> str:
    """This machine's address on the way to ``host``; TrainError if there is no way.

    Connecting a datagram socket sends nothing: it only asks the routing table.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or error
        raise TrainError(
            f"--main-process-ip {host}: no way there from this machine ({reason}); name an address "
            "of machine 0 that every machine reaches"
        ) from None


def is_here(host: str) -> bool:
    """Whether ``host`` is this machine: the way to an own address starts at that address."""
    return local_address(host) in {str(a[4][0]) for a in socket.getaddrinfo(host, None)}


def interface(address: str) -> str | None:
    """The interface that has an IPv4 address; None where none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address, or not Linux
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None
