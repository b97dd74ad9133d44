"""SGLang's sampler, replaced through its own registry.

Upstream's seeded sampler indexes its noise by the sorted rank of a token as soon as one request of the batch asks for
top-p or top-k, so a request's tokens depend on who decodes beside it. Here the noise belongs to the token id
(`draw.py`).

Import only after `host.import_sglang`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend

from rollplex_cli.engines.rollout.args import SAMPLING_BACKEND
from rollplex_cli.engines.rollout.sampling.draw import draw, restrict

if TYPE_CHECKING:
    from collections.abc import Sequence


def register(banned_token_ids: Sequence[int]) -> None:
    """Make `SAMPLING_BACKEND` a sampling backend of SGLang whose samplers never draw `banned_token_ids`."""
    from sglang.srt.layers import sampler as sglang_sampler

    # A later engine of this process may ban other ids.
    sglang_sampler._CUSTOM_SAMPLER_FACTORIES.pop(SAMPLING_BACKEND, None)
    register_sampler_backend(SAMPLING_BACKEND, lambda: SeededSampler(banned_token_ids))


class SeededSampler(Sampler):
    """Replaces SGLang's sampler. Log-probs are log softmax(logits / T) over the tokens not banned, in float32, not
    renormalised for top-p or top-k. A greedy request (temperature 0) has T = 1."""

    def __init__(self, banned_token_ids: Sequence[int]) -> None:
        super().__init__()
        self._banned = tuple(banned_token_ids)
        self._banned_index: torch.Tensor | None = None

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: object,
        token_ids_logprobs: object,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids int64 [n]; writes their log-probs [n] float32 into `logits_output.next_token_logprobs`."""
        logprobs = self._logprobs(logits_output.next_token_logits, sampling_info.temperatures)
        if sampling_info.is_all_greedy:
            tokens = logprobs.argmax(dim=-1)
        else:
            tokens = self._sample(logprobs, sampling_info, positions)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens

    def _logprobs(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        scaled = logits.float().div_(temperatures)
        if self._banned:
            if self._banned_index is None or self._banned_index.device != scaled.device:
                self._banned_index = torch.tensor(self._banned, dtype=torch.int64, device=scaled.device)
            scaled.index_fill_(1, self._banned_index, -torch.inf)
        return torch.log_softmax(scaled, dim=-1)

    def _sample(self, logprobs: torch.Tensor, info: Any, positions: torch.Tensor) -> torch.Tensor:
        allowed = logprobs
        if info.need_top_p_sampling or info.need_top_k_sampling:
            allowed = restrict(logprobs, info.top_ps, info.top_ks)
        # A greedy row has top-k 1 and is left with its one best token.
        return draw(allowed, info.sampling_seed, positions.view(-1))
