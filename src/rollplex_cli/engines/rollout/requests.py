"""From a `GroupRequest` to what SGLang's scheduler takes.

Import only after `host.import_sglang`.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.data.types import Media
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings

_SEED_MASK = (1 << 63) - 1


class GroupInputs:
    """The parts of a group's requests that its responses share, built once."""

    def __init__(self, request: GroupRequest, *, image_token_id: int, video_token_id: int) -> None:
        prompt = request.input
        self.request = request
        self._ids = array("q", prompt.prompt.token_ids)
        self._image_token_id = image_token_id
        self._video_token_id = video_token_id
        self._items = [_item(m, span) for m, span in zip(prompt.prompt.media, prompt.media_spans, strict=True)]
        self._cache_key = cache_key(prompt)
        if self._items:
            for item in self._items:
                item.set_pad_value()
            self._padded = MultimodalProcessorOutput.build_padded_input_ids(self._ids, self._items)
            self._positions = prompt.position_ids.to(torch.int64).cpu()
            self._delta = torch.tensor([[prompt.rope_delta]], dtype=torch.int64)

    @property
    def media_hashes(self) -> list[int]:
        """Under which SGLang caches the vision embeddings, in the order of the media."""
        return [item.hash for item in self._items]

    def limit(self, index: int) -> int:
        """Tokens that response `index` may have."""
        limits = self.request.max_new_tokens
        return self.request.settings.max_new_tokens if limits is None else limits[index]

    def build(self, rid: str, index: int, vocab_size: int) -> Any:
        """SGLang's request for response `index`."""
        return TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", self._ids),
            input_embeds=None,
            mm_inputs=self._media_inputs() if self._items else None,
            token_type_ids=None,
            sampling_params=_sampling(self.request.settings, self.limit(index), self.request.seeds[index], vocab_size),
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=self._cache_key,
        )

    def _media_inputs(self) -> Any:
        # SGLang clears the features of a finished request: each response needs items of its own.
        return MultimodalProcessorOutput(
            mm_items=[copy.copy(item) for item in self._items],
            padded_input_ids=self._padded,
            im_token_id=self._image_token_id,
            video_token_id=self._video_token_id,
            mrope_positions=self._positions,
            mrope_position_delta=self._delta,
        )


def cache_key(prompt: PromptInput) -> str | None:
    """Namespace of a prompt in the prefix cache; `None` for text.

    SGLang identifies a medium by 30 bits of its hash and does not look at positions, so without a namespace two
    media might be taken for one another, and one video at two frame rates always would be.
    """
    if not prompt.prompt.media:
        return None
    end = prompt.media_spans[-1][1] + 1
    digest = hashlib.blake2b(digest_size=16)
    for medium in prompt.prompt.media:
        digest.update(repr((medium.content_hash, medium.grid_thw, medium.kind)).encode())
    digest.update(prompt.position_ids[:, :end].contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _item(medium: Media, span: tuple[int, int]) -> Any:
    steps, rows, columns = medium.grid_thw
    # One grid row per temporal step: given [t, h, w] in one row, SGLang's full-attention vision blocks attend
    # across all steps, where the model attends within each. Patch order, rotary positions and windows are the same.
    grid = torch.tensor([[1, rows, columns]] * steps, dtype=torch.int64)
    video = medium.kind == "video"
    specific: dict[str, Any] = {"video_grid_thw" if video else "image_grid_thw": grid}
    if video:
        specific["second_per_grid_ts"] = torch.tensor([medium.seconds_per_grid])
    key = hashlib.blake2b(repr((medium.content_hash, medium.grid_thw)).encode(), digest_size=8).digest()
    return MultimodalDataItem(
        modality=Modality.VIDEO if video else Modality.IMAGE,
        hash=int.from_bytes(key, "big") >> 1,
        offsets=[span],
        feature=medium.patches,
        model_specific_data=specific,
    )


def _sampling(settings: SamplingSettings, limit: int, seed: int, vocab_size: int) -> Any:
    params = SamplingParams(
        max_new_tokens=limit,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        ignore_eos=settings.ignore_eos,
        sampling_seed=seed & _SEED_MASK,
    )
    params.normalize(None)
    params.verify(vocab_size)
    return params


def check(requests: Sequence[GroupRequest], known_groups: set[int]) -> None:
    """Raise ValueError for requests that contradict the contract of `GroupRequest`."""
    seen = set(known_groups)
    for request in requests:
        if request.group in seen:
            raise ValueError(f"group id is already in use: {request.group}")
        seen.add(request.group)
        prompt = request.input
        if not request.seeds:
            raise ValueError(f"a group needs at least one seed, group: {request.group}")
        if request.max_new_tokens is not None and len(request.max_new_tokens) != len(request.seeds):
            raise ValueError(f"one `max_new_tokens` per seed is needed, group: {request.group}")
        limits = request.max_new_tokens or (request.settings.max_new_tokens,)
        if min(limits) < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1, group: {request.group}")
        if prompt.num_tokens < 1 or tuple(prompt.position_ids.shape) != (3, prompt.num_tokens):
            raise ValueError(f"positions must be [3, prompt tokens], group: {request.group}")
        last = int(prompt.position_ids[0, -1])
        if not prompt.prompt.media and (prompt.rope_delta, last) != (0, prompt.num_tokens - 1):
            raise ValueError(f"a prompt without media has positions 0..P-1, group: {request.group}")
