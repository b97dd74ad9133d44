"""Where a difference of log-probs between rollout and trainer comes from: both against a float32 forward.

    python tools/gpu/parity_account.py --fp32-head                     7B shape, random weights, 2 GPUs
    python tools/gpu/parity_account.py --model tiny --device cpu       the same path over gloo

Decodes a few prompts and scores the same tokens with the trainer's forward, with copies of the weights in float32, and
with variants of the 16-bit forward: rotary angles rounded to the activations' type as the rollout and Hugging Face do,
norms of the unrounded residual sum as the rollout's fused kernel does, residual stream in float32, head in float32.
Prints mean absolute differences by prompt, one line of JSON each; for a variant: to float32, to the rollout. Options
as in `weights_check.py`.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import weights_check


@dataclass(frozen=True)
class Variant:
    """What a forward does otherwise than the trainer's."""

    round_angles: bool = False
    fused_norm: bool = False
    wide_residual: bool = False
    wide_head: bool = False


VARIANTS = {
    "as_shipped": Variant(),
    "angles": Variant(round_angles=True),
    "norm": Variant(fused_norm=True),
    "angles_norm": Variant(round_angles=True, fused_norm=True),
    "angles_norm_head": Variant(round_angles=True, fused_norm=True, wide_head=True),
    "residual_head": Variant(wide_residual=True, wide_head=True),
    "angles_residual": Variant(round_angles=True, wide_residual=True),
}


class Forward:
    """A forward of `split`'s weights without a graph, with a variant's differences."""

    def __init__(self, split: Any, variant: Variant) -> None:
        self.split, self.variant, self.weights = split, variant, split.weights
        self.dtype, self.device = self.weights.dtype, self.weights.device

    def logprobs(self, prompt: Any, packed: Any) -> Any:
        """Log-probs [S] of the packed responses, float32 on the host."""
        import torch
        from torch.nn.functional import linear

        from rollplex_cli.engines.trainer.model import language
        from rollplex_cli.engines.trainer.model.parallel import sharded_logprobs
        from rollplex_cli.engines.trainer.model.suffix_attention import suffix_attention

        weights, sizes = self.weights, self.weights.text_sizes
        end = prompt.num_tokens - 1
        ids = torch.tensor(prompt.prompt.token_ids[:end], device=self.device)
        hidden = language.embed(weights, ids, self.split._encode([prompt]), prompt.media_spans).unsqueeze(0)
        _, boundary = self._layers(hidden, self._angles(prompt.position_ids[:, :end]), None, None)
        ratio = sizes.num_heads // sizes.num_kv_heads
        behind = suffix_attention(packed.lengths, packed.segments.to(self.device), end, ratio, self.dtype)
        hidden = language.embed(weights, packed.token_ids.to(self.device), None, ()).unsqueeze(0)
        x, _ = self._layers(hidden, self._angles(packed.position_ids), boundary, behind)
        x = x[0]
        logits = x.float() @ weights.head.float().t() if self.variant.wide_head else linear(x, weights.head).float()
        if self.split._banned is not None:
            logits = logits.index_fill(-1, self.split._banned, -1e9)
        targets = packed.targets.to(self.device)
        if weights.parallel.size > 1:
            return sharded_logprobs(logits, targets, weights.vocab, weights.parallel).float().cpu()
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none").float().cpu()

    def _angles(self, position_ids: Any) -> Any:
        from rollplex_cli.engines.trainer.model import language
        from rollplex_cli.engines.trainer.model.primitives import Angles

        angles = language.rope(self.weights.text_sizes, position_ids.to(self.device).unsqueeze(1), self.dtype)
        if self.variant.round_angles:
            angles = Angles(*(t.to(self.dtype).to(t.dtype) for t in angles))
        return angles

    def _layers(self, hidden: Any, angles: Any, boundary: Any, behind: Any) -> tuple[Any, list[Any]]:
        """(normalised output [1, S, hidden], keys and values by layer)."""
        from rollplex_cli.engines.trainer.model import language
        from rollplex_cli.engines.trainer.model.primitives import swiglu

        weights, sizes = self.weights, self.weights.text_sizes
        branch, own = None, []
        for index, layer in enumerate(weights.layers):
            hidden, x = self._add_and_norm(hidden, branch, layer.input_norm)
            q, key_value = language.project_qkv(layer, sizes, x, angles)
            own.append(key_value)
            if boundary is None:
                mixed = self.split._attention(q, key_value.keys, key_value.values, causal=True)
            else:
                mixed = behind(q, boundary[index], key_value)
            hidden, x = self._add_and_norm(hidden, layer.output(mixed), layer.post_norm)
            branch = layer.down(swiglu(layer.gate_up(x)))
        return self._add_and_norm(hidden, branch, weights.norm)[1], own

    def _add_and_norm(self, hidden: Any, branch: Any, weight: Any) -> tuple[Any, Any]:
        from torch.nn.functional import rms_norm

        total = hidden if branch is None else hidden.float() + branch.float()
        rounded = total if self.variant.wide_residual else total.to(self.dtype)
        if not self.variant.fused_norm:
            total = rounded
        wide = rms_norm(total.float(), weight.shape, weight.float(), self.weights.text_sizes.norm_eps)
        return rounded, wide.to(self.dtype)


class Account(weights_check.Check):
    """One rank; its differences are printed and not judged."""

    def differences(self, turn: int) -> dict[str, Any]:
        """See the module."""
        from rollplex_cli.engines.trainer.actor import shard_weights
        from rollplex_cli.engines.trainer.split import SplitModel

        if turn:
            return {}
        torch = self.torch
        torch.backends.cuda.matmul.allow_tf32 = False
        banned = tuple(self.engine.banned_token_ids)
        split = SplitModel(shard_weights(self.module, self.shard), banned_token_ids=banned)
        wide_weights = shard_weights(copy.deepcopy(self.module).float(), self.shard)
        exact = Forward(SplitModel(wide_weights, banned_token_ids=banned), Variant())
        for name, prompt, packed, sampled in self.decoded(turn):
            with torch.no_grad():
                truth = exact.logprobs(prompt, packed)
                scored = split.suffix(split.prefix(prompt, "none"), packed).float().cpu()
                row: dict[str, Any] = {
                    "prompt": name,
                    "prompt_tokens": prompt.num_tokens,
                    "rollout_to_float32": mean_difference(sampled, truth),
                    "trainer_to_float32": mean_difference(scored, truth),
                    "trainer_to_rollout": mean_difference(scored, sampled),
                }
                for label, variant in VARIANTS.items():
                    got = Forward(split, variant).logprobs(prompt, packed)
                    row[label] = [mean_difference(got, truth), mean_difference(got, sampled)]
            if self.arguments.rank == 0:
                print(json.dumps(row), flush=True)
        return {}


def mean_difference(a: Any, b: Any) -> float:
    """Mean absolute difference of two tensors."""
    return round(float((a - b).abs().mean()), 5)


if __name__ == "__main__":
    sys.exit(weights_check.main(Account, __file__))
