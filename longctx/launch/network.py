"""The address that a node's ranks give to those of other nodes."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

import psutil


def choose_interface(env: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME on a node whose own name stands for its loopback, as in Debian's /etc/hosts.

    gloo takes the address of that name and gives it to the other nodes, which then look for it on themselves.

    Raises:
        ValueError: where several interfaces could be meant.
    """
    world, local = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
    if world == local or "GLOO_SOCKET_IFNAME" in env or not _is_loopback(host := socket.gethostname()):
        return
    interfaces = _interfaces()
    towards = _address_towards(env["MASTER_ADDR"])
    found = [name for name, addresses in interfaces.items() if towards in addresses] or list(interfaces)
    if len(found) != 1:
        raise ValueError(
            f"on {host}, that name stands for the loopback, which other nodes cannot reach; they could mean any of the "
            f"interfaces {', '.join(found) or '(none is up)'}. Set GLOO_SOCKET_IFNAME to the name of theirs."
        )
    env["GLOO_SOCKET_IFNAME"] = found[0]


def _is_loopback(host: str) -> bool:
    """Also for a name without address: gloo falls back to the loopback."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return True


def _interfaces() -> dict[str, set[str]]:
    """Addresses of those that are up, without loopbacks."""
    states, found = psutil.net_if_stats(), {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = {entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)}
        if addresses and states[name].isup and "127.0.0.1" not in addresses:
            found[name] = addresses
    return found


def _address_towards(host: str) -> str:
    """This node's, on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return probe.getsockname()[0]
