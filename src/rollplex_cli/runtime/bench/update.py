"""The optimizer's streaming against what the link to the host allows."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.units import MIB
from rollplex_cli.engines.trainer.adamw.link import measure_link

if TYPE_CHECKING:
    from collections.abc import Iterable

LINK_BYTES = 256 * MIB


def summarize_updates(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds and the bytes of an update on this rank; on a GPU also the measured rates of the link, the least
    time they allow, and how many times that an update takes."""
    updates = [row["optimizer"] for row in rows]
    last = updates[-1]
    seconds = statistics.median(update["seconds"] for update in updates)
    found = {
        "update_s_median": seconds,
        "to_device_bytes": last["to_device_bytes"],
        "to_host_bytes": last["to_host_bytes"],
        "exchanged_bytes": last["exchanged_bytes"],
        "link": None,
        "link_s": None,
        "ratio": None,
    }
    if torch.cuda.is_available() and last["to_device_bytes"]:
        source, target = (torch.zeros(LINK_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
        rates = measure_link(torch.device("cuda", torch.cuda.current_device()), (source, target))
        least = rates.seconds(last["to_device_bytes"], last["to_host_bytes"])
        found["link"] = {"to_device": rates.to_device, "to_host": rates.to_host, "both": rates.both}
        found |= {"link_s": least, "ratio": seconds / least}
    return found
