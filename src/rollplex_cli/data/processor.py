"""From a sample to a prompt: media decoded and cut into patches, chat template applied, placeholders expanded."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.core.errors import DataError, LongPromptError, UsageError
from rollplex_cli.core.imports import without_collector
from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.data.images import read_image
from rollplex_cli.data.types import Media, Prompt
from rollplex_cli.data.video import TEMPORAL_PATCH, read_video
from rollplex_cli.plan.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from rollplex_cli.data.types import MediaRef, Sample
    from rollplex_cli.profile.schema import DataProfile

_PLACEHOLDER = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_FRAMED_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
"""What a chat template writes for a video."""


class PromptBuilder:
    """Builds prompts for one model. Building is deterministic and safe from several threads.

    Args:
        processor_dir: a checkpoint folder with tokenizer, chat template and the Qwen2-VL processors' files.
        profile: limits on frames, pixels and tokens.

    Raises:
        UsageError: the folder does not load, or has no chat template or no Qwen placeholders; `data.max_frames`
            is under the two frames of a patch.
    """

    def __init__(self, processor_dir: Path, profile: DataProfile) -> None:
        if profile.max_frames < TEMPORAL_PATCH:
            raise UsageError(f"`data.max_frames` must be at least {TEMPORAL_PATCH}: {profile.max_frames}")
        self._profile = profile
        config = _config(processor_dir)
        family = FAMILIES.get(str(config.get("model_type")))
        self._time_in_text = family is not None and family.video_time == "text"
        self._longest_s = _longest_s(config) if family is not None and family.video_time == "seconds" else math.inf
        processor = _load(processor_dir)
        self._tokenizer: Any = processor.tokenizer
        self._image: Any = processor.image_processor
        self._video: Any = processor.video_processor
        self._template = processor.chat_template or self._tokenizer.chat_template
        if self._template is None:
            raise UsageError(f"no chat template in: {processor_dir}")
        added = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        if missing := sorted(set(_PLACEHOLDER.values()) - added):
            raise UsageError(f"tokenizer in {processor_dir} has no special token: {missing[0]}")
        self._ids = {kind: self._tokenizer.convert_tokens_to_ids(token) for kind, token in _PLACEHOLDER.items()}
        # Longest first, as the tokenizer itself matches.
        self._special = re.compile("|".join(re.escape(t) for t in sorted(added, key=len, reverse=True)))
        # The tokenizer keeps the options of the call in progress in itself.
        self._lock = threading.Lock()
        if self._video.temporal_patch_size != TEMPORAL_PATCH:
            raise UsageError(f"temporal patch of the video processor must be {TEMPORAL_PATCH}: {processor_dir}")

    @property
    def eos_token_id(self) -> int:
        """Id that ends a response."""
        return int(self._tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """Id for padding; the end token where the tokenizer has no other."""
        pad = self._tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    def build(self, sample: Sample) -> Prompt:
        """The prompt of a sample: its messages, or one user turn with its media, then its question.

        Raises:
            DataError: media that cannot be read, a question that holds special tokens, or a prompt longer than
                `data.max_prompt_tokens`; the message names the sample.
        """
        self._check_text(sample)
        try:
            shown = [self._media(reference) for reference in sample.media]
        except DataError as error:
            raise DataError(f"sample `{sample.sample_id}`: {error.message}", hint=error.hint) from None
        media = tuple(medium for media, _ in shown for medium in media)
        stamps = [stamp for (first, *_), stamp in shown if first.kind == "video"]
        token_ids = self._expand(self._template_ids(sample, stamps), media)
        limit = self._profile.max_prompt_tokens
        if len(token_ids) > limit:
            raise LongPromptError(
                f"sample `{sample.sample_id}`: prompt has {len(token_ids)} tokens, more than `data.max_prompt_tokens` "
                f"allows: {limit}",
                hint="lower `data.fps`, `data.max_frames` or `data.max_pixels`, or raise `data.max_prompt_tokens`",
            )
        return Prompt(sample=sample, token_ids=tuple(token_ids), media=media)

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as a whole response, the end token included. For supervised targets."""
        with self._lock:
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return (*ids, self.eos_token_id)

    def decode_response(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Text of generated ids without special tokens; ids that stand for nothing decode to nothing."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _check_text(self, sample: Sample) -> None:
        # A special token in a question would become a control token: a media placeholder without media, or a turn
        # that the user never took.
        for message in sample.turns():
            for part in message.content:
                if isinstance(part, str) and (found := self._special.search(part)):
                    raise DataError(
                        f"sample `{sample.sample_id}`: question holds the special token: {found.group()}",
                        hint="media belong in the sample's `media`, not in its text",
                    )
                if isinstance(part, str) and any("\ud800" <= c <= "\udfff" for c in part):
                    raise DataError(f"sample `{sample.sample_id}`: text with half a character: {part[:60]!r}")

    def _template_ids(self, sample: Sample, stamps: list[tuple[float, ...]]) -> list[int]:
        """Ids with one placeholder per medium; `stamps` has the seconds of each video's temporal steps, in order."""
        messages = [{"role": turn.role, "content": [_part(part) for part in turn.content]} for turn in sample.turns()]
        with self._lock:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
            if self._time_in_text:
                text = _stamped(text, stamps)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(i) for i in ids]

    def _expand(self, ids: list[int], media: tuple[Media, ...]) -> list[int]:
        """Repeat each placeholder once per merged patch of its medium."""
        kinds = {token: kind for kind, token in self._ids.items()}
        merge = int(self._video.merge_size)
        rest = iter(media)
        expanded: list[int] = []
        for token in ids:
            if token not in kinds:
                expanded.append(token)
                continue
            medium = next(rest, None)
            assert medium is not None, "chat template invented a medium"
            assert medium.kind == kinds[token], "chat template changed the order of media"
            steps, rows, columns = medium.grid_thw
            count = steps * rows * columns // merge**2
            assert medium.patches.shape[0] == count * merge**2, "patches and grid disagree"
            expanded += [token] * count
        assert next(rest, None) is None, "chat template dropped a medium"
        return expanded

    def _media(self, reference: MediaRef) -> tuple[tuple[Media, ...], tuple[float, ...]]:
        """What a file becomes, and when its temporal steps are: one medium, or one per step where the text between
        them tells the time."""
        if reference.kind == "image":
            return (self._read_image(reference.path),), ()
        medium, seconds = self._read_video(reference.path)
        return (_steps(medium) if self._time_in_text else (medium,)), seconds

    def _read_video(self, path: Path) -> tuple[Media, tuple[float, ...]]:
        profile = self._profile
        clip = read_video(
            path, fps=profile.fps, max_frames=profile.max_frames, min_frames=profile.min_frames,
            rule=profile.frame_sampling,
        )  # fmt: skip
        frames, size = _channels_first(clip.frames), self._size(len(clip.frames))
        # Frames are sampled already: the processor only resizes, normalises and cuts.
        output = _process(
            lambda: self._video(videos=[frames], do_sample_frames=False, size=size, return_tensors="pt"), path
        )
        seconds = TEMPORAL_PATCH / clip.sampled_fps
        if (span := seconds * len(clip.frames) / TEMPORAL_PATCH) > self._longest_s:
            raise DataError(
                f"video lasts {span:.3g} s, more than the model has positions for (`max_position_embeddings`, "
                f"{self._longest_s:.3g} s): {path}"
            )
        # A step is as late as the middle of its first and last frame.
        firsts, lasts = clip.timestamps[::TEMPORAL_PATCH], clip.timestamps[TEMPORAL_PATCH - 1 :: TEMPORAL_PATCH]
        middles = tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))
        return _medium("video", output["pixel_values_videos"], output["video_grid_thw"], seconds), middles

    def _read_image(self, path: Path) -> Media:
        pixels = _channels_first(read_image(path))
        output = _process(lambda: self._image(images=[pixels], size=self._size(), return_tensors="pt"), path)
        return _medium("image", output["pixel_values"], output["image_grid_thw"], 0.0)

    def _size(self, num_frames: int = 0) -> dict[str, int]:
        """Limits on the pixels of an image, or of each of a video's frames. What a long video may have in all is
        shared out as `qwen-vl-utils` does: by pairs of frames, and never so that nothing fits any more."""
        profile, most = self._profile, self._profile.max_pixels
        if num_frames and profile.total_pixels is not None:
            share = profile.total_pixels * TEMPORAL_PATCH // num_frames
            most = min(most, max(share, int(profile.min_pixels * 1.05)))
        # The processors call the least and most number of pixels "edges"; that of Qwen3-VL counts those of all frames.
        frames = num_frames if num_frames and self._time_in_text else 1
        return {"shortest_edge": profile.min_pixels * frames, "longest_edge": most * frames}


def _stamped(text: str, stamps: list[tuple[float, ...]]) -> str:
    """`text` with each video's placeholder replaced by one per temporal step behind its time, as Qwen3-VL was trained
    with and as its first processors did it (newer ones leave the outer marks in place)."""
    first, *rest = text.split(_FRAMED_VIDEO)
    assert len(rest) == len(stamps), "chat template changed the number of videos"
    videos = ("".join(f"<{seconds:.1f} seconds>{_FRAMED_VIDEO}" for seconds in video) for video in stamps)
    return first + "".join(video + after for video, after in zip(videos, rest, strict=True))


def _steps(video: Media) -> tuple[Media, ...]:
    """The temporal steps of a video as media of their own."""
    _, rows, columns = video.grid_thw
    grid = [[1, rows, columns]]
    return tuple(_medium("video", patches, grid, 0.0) for patches in video.patches.split(rows * columns))


def _config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder; empty where it has none."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UsageError(f"cannot read the model configuration `{path}`: {error}") from error
    return config


def _longest_s(config: dict[str, Any]) -> float:
    """Seconds for which a model has temporal positions that are in proportion to seconds."""
    text, vision = config.get("text_config") or config, config.get("vision_config") or {}
    limit = text.get("max_position_embeddings")
    return math.inf if limit is None else float(limit) / float(vision.get("tokens_per_second", 2))


def _part(part: str | MediaRef) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise UsageError(f"no such checkpoint folder: {folder}")
    with without_collector():
        ensure_torchvision()
        from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"processor does not load ({error}): {folder}") from error
    parts = ("tokenizer", "image_processor", "video_processor")
    if missing := [part for part in parts if getattr(processor, part, None) is None]:
        raise UsageError(f"checkpoint has no {missing[0].replace('_', ' ')}: {folder}")
    return processor


def _channels_first(pixels: NDArray[Any]) -> Any:
    """[..., height, width, 3] uint8 array to a [..., 3, height, width] tensor."""
    import torch

    return torch.from_numpy(pixels.copy()).movedim(-1, -3)


def _process(call: Callable[[], Any], path: Path) -> Any:
    try:
        return call()
    except (ValueError, ZeroDivisionError) as error:
        # Aspect ratios above 200 have no grid.
        raise DataError(f"medium cannot be processed ({error}): {path}") from None


def _medium(kind: Literal["video", "image"], patches: Any, grid: Any, seconds_per_grid: float) -> Media:
    steps, rows, columns = (int(size) for size in grid[0])
    patches = patches.float().contiguous()
    # Time is part of the content: the same frames at another rate have other positions.
    digest = hashlib.sha256(f"{kind} {steps} {rows} {columns} {seconds_per_grid!r} ".encode())
    digest.update(patches.numpy().tobytes())
    return Media(
        kind=kind,
        patches=patches,
        grid_thw=(steps, rows, columns),
        seconds_per_grid=seconds_per_grid,
        content_hash=int.from_bytes(digest.digest()[:8], "big") >> 2,
    )
