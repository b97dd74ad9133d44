"""The reference policy: the same split forward over frozen weights, log-probs only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.engines.trainer.actor import shard_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.names import is_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.trainer.model.vision import Encoded
    from rollplex_cli.engines.trainer.prefix import PrefixState
    from rollplex_cli.engines.trainer.sharded import Shard
    from rollplex_cli.rl.packing import PackedSuffix


class Reference:
    """Scores responses under weights that never change.

    Args:
        hf_model: a module whose weights nobody writes; they are frozen here. Its adapters, if it has any, are left
            alone and not read: the base of an actor with adapters is its reference, and takes no memory.
        temperature: of the rollout, so that log-probs compare with the policy's.
        banned_token_ids: as the actor's.
        shard: this rank's share where a training group has several ranks.
    """

    def __init__(
        self,
        hf_model: Any,
        *,
        temperature: float = 1.0,
        banned_token_ids: Sequence[int] = (),
        shard: Shard | None = None,
    ) -> None:
        for name, parameter in hf_model.named_parameters():
            if not is_adapter(name):
                parameter.requires_grad_(False)
        self._split = SplitModel(
            shard_weights(hf_model, shard),
            temperature=temperature,
            banned_token_ids=banned_token_ids,
        )

    def prefix(self, prompt: PromptInput, media: Encoded | None = None) -> PrefixState:
        """Boundary keys and values of a prompt, without a graph; `media` is its tower's output, if another tower of the
        same weights ran before."""
        return self._split.prefix(prompt, "none", media)

    def prefixes(self, prompts: Sequence[PromptInput], media: Encoded | None = None) -> list[PrefixState]:
        """The same for several prompts in one pass; `media` is of all of them."""
        return self._split.prefixes(prompts, "none", media)

    def suffix(self, state: PrefixState, packed: PackedSuffix) -> torch.Tensor:
        """Log-probs [S] of the packed responses; drops the boundary, which has no further use."""
        with torch.no_grad():
            logprobs = self._split.suffix(state, packed)
        state.release()
        return logprobs
