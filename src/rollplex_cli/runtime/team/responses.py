"""Bringing the responses of a prompt group to every rank that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from rollplex_cli.engines.collectives import CollectiveLog, name_of, unwatched
from rollplex_cli.engines.rollout.base import GroupResult, Response

if TYPE_CHECKING:
    from collections.abc import Sequence

_FINISH: tuple[Literal["stop", "length", "abort"], ...] = ("stop", "length", "abort")
_FIELDS = 3
"""Of a response in the header: length, how it ended, cached tokens."""


class ResponseExchange:
    """Broadcasts within a training group, in the order of its trainer tasks.

    Args:
        group: a gloo group of the training group's ranks, used for nothing else.
        owners: global rank that speaks for each replica.
        log: of the trainer lane.
    """

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int], log: CollectiveLog | None = None) -> None:
        self._group, self._owners, self._log = group, tuple(owners), log or unwatched()
        self._name = name_of("response group", group)

    def run(self, group: int, replica: int, group_size: int, own: GroupResult | None) -> GroupResult:
        """The responses of a group that `replica` decoded; `own` on the rank that speaks for it. Exact."""
        source = self._owners[replica]
        sends = dist.get_rank() == source
        header = torch.zeros(1 + _FIELDS * group_size, dtype=torch.int64)
        if sends:
            assert own is not None and len(own.responses) == group_size, group
            fields = [(len(r.token_ids), _FINISH.index(r.finish_reason), r.cached_tokens) for r in own.responses]
            header = torch.tensor([own.decode_step, *(v for row in fields for v in row)], dtype=torch.int64)
        self._broadcast(header, source)
        rows = header[1:].view(group_size, _FIELDS)
        total = int(rows[:, 0].sum())
        ids, logprobs = torch.zeros(2, total, dtype=torch.int64), torch.zeros(total, dtype=torch.float64)
        if sends:
            assert own is not None
            ids[0] = torch.tensor([t for r in own.responses for t in r.token_ids], dtype=torch.int64)
            ids[1] = torch.tensor([v for r in own.responses for v in r.weight_versions], dtype=torch.int64)
            logprobs = torch.tensor([x for r in own.responses for x in r.logprobs], dtype=torch.float64)
        if total:
            self._broadcast(ids, source)
            self._broadcast(logprobs, source)
        return GroupResult(group=group, responses=_unpack(rows, ids, logprobs), decode_step=int(header[0]))

    def _broadcast(self, values: torch.Tensor, source: int) -> None:
        with self._log.launch("broadcast", self._name, values.nbytes, on_host=True):
            dist.broadcast(values, src=source, group=self._group)


def _unpack(rows: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> tuple[Response, ...]:
    responses, start = [], 0
    for length, finish, cached in rows.tolist():
        stop = start + length
        responses.append(
            Response(
                token_ids=tuple(ids[0, start:stop].tolist()),
                logprobs=tuple(logprobs[start:stop].tolist()),
                weight_versions=tuple(ids[1, start:stop].tolist()),
                finish_reason=_FINISH[finish],
                cached_tokens=cached,
            )
        )
        start = stop
    return tuple(responses)
