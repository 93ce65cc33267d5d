"""Which way RCCL took between nodes, read from what it says with NCCL_DEBUG=INFO; nothing else tells.

RCCL falls back to sockets without an error, at a twelfth of the speed. Standard library only. Read from logs that
others published; not run on AMD hardware.
"""

import re
from collections import Counter
from dataclasses import dataclass

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .* via (NET/[^/\n]+)/\S*?(/GDRDMA)?(?:/Shared)?\s*$", re.MULTILINE)
_CHOSEN = re.compile(r"Using network (\S.*?)\s*$", re.MULTILINE)
_WHY_NOT = re.compile(
    r"NCCL (?:INFO|WARN) ((?:NET/(?:IB|OFI|Plugin)|Failed to open libibverbs)[^\n]*"
    r"(?:[Nn]o device|not? found|[Ff]ailed|[Cc]ould not)[^\n]*)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """What RCCL uses between nodes."""

    name: str | None  # "NET/IB", "NET/Socket", ...; None where no connection was made or nothing was written
    with_rdma_to_gpu: bool
    reason: str | None  # why it is not another one, in RCCL's own words


def read(text: str) -> Transport:
    """From the debug output of one rank."""
    channels = Counter(match[1] for match in _CHANNEL.finditer(text))
    # One channel over sockets slows all of them down.
    sockets = next((name for name in channels if name == "NET/Socket"), None)
    name = sockets or next(iter(channels), None)
    if name is None and (chosen := _CHOSEN.search(text)):
        name = f"NET/{chosen[1]}"
    reasons = [" ".join(match[1].split()) for match in _WHY_NOT.finditer(text)]
    direct = any(match[2] for match in _CHANNEL.finditer(text))
    return Transport(name=name, with_rdma_to_gpu=direct, reason=reasons[0] if reasons else None)


def problem(transport: Transport, *, allow_sockets: bool) -> str | None:
    """One line where it is the slow way, and nobody allowed that."""
    if transport.name != "NET/Socket" or allow_sockets:
        return None
    why = f" ({transport.reason})" if transport.reason else ""
    return (
        f"RCCL talks through sockets{why}, at about a twelfth of the speed: bind the verbs provider or the network "
        "plugin of the host (container.binds, container.env.NCCL_NET_PLUGIN), name the adapters "
        "(container.env.NCCL_IB_HCA), or set preflight.allow_sockets=true"
    )
