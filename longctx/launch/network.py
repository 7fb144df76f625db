"""The network interface that ranks listen on: the loopback on one machine, else one that other nodes reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping
from contextlib import suppress

import psutil


def choose_interface(env: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, unless the user has.

    Ranks of one machine use its loopback, which no other machine reaches. Between machines, gloo announces the address
    of this machine's name. If that is the loopback, as in Debian's /etc/hosts, another interface is chosen.

    Raises:
        ValueError: if several interfaces are possible, or none.
    """
    if "LOCAL_WORLD_SIZE" not in env:
        return
    if env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"]:
        if loopback := next((name for name, found in _interfaces().items() if "127.0.0.1" in found), None):
            env.setdefault("GLOO_SOCKET_IFNAME", loopback)
            env.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
    elif "GLOO_SOCKET_IFNAME" not in env and _is_loopback(host := socket.gethostname()):
        env["GLOO_SOCKET_IFNAME"] = _interface_towards(env["MASTER_ADDR"], host)


def _interface_towards(address: str, host: str) -> str:
    """Return the name of the interface by which this host reaches the address; nothing is sent."""
    interfaces = {name: found for name, found in _interfaces().items() if "127.0.0.1" not in found}
    towards = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))
        towards = probe.getsockname()[0]
    found = [name for name, addresses in interfaces.items() if towards in addresses] or list(interfaces)
    if len(found) != 1:
        raise ValueError(
            f"the name {host} resolves to the loopback address, which other nodes cannot reach. This host has the "
            f"interfaces {', '.join(found) or '(none is up)'}. Set GLOO_SOCKET_IFNAME to the one that reaches them."
        )
    return found[0]


def _is_loopback(host: str) -> bool:
    """Return whether gloo takes the name for the loopback, as it does without an address."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return True


def _interfaces() -> dict[str, set[str]]:
    """Return the addresses of interfaces that are up."""
    states, found = psutil.net_if_stats(), {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = {entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)}
        if addresses and states[name].isup:
            found[name] = addresses
    return found
