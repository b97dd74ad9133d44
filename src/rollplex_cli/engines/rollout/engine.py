"""The rollout engine: a hosted SGLang scheduler behind the `RolloutEngine` protocol."""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from rollplex_cli.core.errors import NonFiniteError, RunFailedError, UsageError
from rollplex_cli.engines.rollout import host
from rollplex_cli.engines.rollout.base import GroupResult, Response, VisionOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.engines.rollout.args import RolloutOptions
    from rollplex_cli.engines.rollout.base import GroupRequest, RolloutEngine


P = ParamSpec("P")
R = TypeVar("R")


def _engine_call(method: Callable[Concatenate[SglangRollout, P], R]) -> Callable[Concatenate[SglangRollout, P], R]:
    """A call of an open engine, from its own thread, with its device and stream current."""

    @wraps(method)
    def call(self: SglangRollout, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise ValueError("the rollout engine is closed")
        if threading.get_ident() != self._thread:
            raise ValueError("the rollout engine was called from a thread that did not construct it")
        with self._enter():
            return method(self, *args, **kwargs)

    return call


@dataclass(slots=True)
class _Track:
    """One response on its way."""

    group: int
    index: int
    req: Any = None
    """SGLang's request; `None` until it is submitted to the scheduler."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(tokens generated before, version) for each weight version it has lived under."""
    cached_tokens: int | None = None
    response: Response | None = None


@dataclass(slots=True)
class _Group:
    inputs: Any
    tracks: list[_Track]
    siblings_wait: bool = True
    prefix: tuple[tuple[torch.Tensor, torch.Tensor], ...] | None = None
    media: list[int] = field(default_factory=list)
    """Hashes of the media whose embeddings are kept for it; empty where nobody asked."""
    vision_due: bool = False
    """Whether they have yet to be offered in this step of training."""


class SglangRollout:
    """Hosts one SGLang scheduler in this process. See `RolloutEngine` for the calls.

    The default process group must exist (any backend that has gloo); with several replicas every rank constructs its
    engine at the same point. Every later call must come from the thread that constructed the engine, and none of
    them communicates at TP 1.

    Raises:
        ValueError: no default process group, replicas that overlap or lack this rank, or a second engine.
        UsageError: a checkpoint whose weight names SGLang would skip.
        ClusterError: SGLang missing, of another version, or imported for the other device.
    """

    _alive: ClassVar[bool] = False
    """SGLang keeps groups, arguments and caches in module globals: one engine per process at a time."""

    def __init__(self, options: RolloutOptions) -> None:
        replicas, tp_rank = _replica_layout(options)
        if SglangRollout._alive:
            raise ValueError("this process hosts a rollout engine already: close it first")
        host.import_sglang(options.device)
        from rollplex_cli.engines.rollout import build

        self._thread = threading.get_ident()
        self._closed = False
        self._enter = partial(build.on_stream, options)
        built = build.scheduler(options, replicas, tp_rank)
        if options.run_ahead:
            # What the calls put on the device prepares batches; these run on `options.stream`.
            self._enter = partial(build.on_stream, dataclasses.replace(options, stream=built.scheduler.schedule_stream))
        SglangRollout._alive = True
        self._scheduler: Any = built.scheduler
        self._image_token_id: int = built.image_token_id
        self._video_token_id: int = built.video_token_id
        self._vocab_size: int = built.vocab_size
        self._capacity: int = built.capacity
        self._version = 0
        self._steps = 0
        self._groups: dict[int, _Group] = {}
        self._ready: list[GroupResult] = []
        """Groups whose last tokens were taken in by `pause` or `abort`; the next step returns them."""
        self._vision: list[VisionOutput] = []
        """Found and not yet taken."""
        self._by_rid: dict[str, _Track] = {}
        self._serial = 0

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; grows by one with each `publish`."""
        return self._version

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled and count as probability 0: whoever recomputes log-probs masks them too."""
        return (self._image_token_id, self._video_token_id)

    @property
    def capacity_tokens(self) -> int:
        """Prompt plus response tokens that one response may have."""
        return self._capacity

    @property
    def num_running(self) -> int:
        """Responses submitted to the scheduler and not ended."""
        return len(self._by_rid)

    @_engine_call
    def parameters(self) -> dict[str, torch.Tensor]:
        """The engine's own parameter tensors by SGLang name. Writing through them changes the model."""
        return {name: parameter.data for name, parameter in self._scheduler.model.named_parameters()}

    # -- a step ---------------------------------------------------------------------------------------------------

    @_engine_call
    def begin_step(self) -> None:
        """Reset the logical clock; the engine must be idle or paused. If idle, checks that no KV slot was lost."""
        if self.has_work() and self._scheduler.holds_kv:
            raise ValueError("`begin_step` needs an idle or paused engine")
        if not self.has_work():
            self._scheduler.check_idle()
        self._steps = 0
        for group in self._groups.values():
            group.vision_due = bool(group.media)

    @_engine_call
    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. Raises UsageError for a request that can never run; then none of `requests` is queued."""
        from rollplex_cli.engines.rollout import requests as conversion

        conversion.check(requests, {*self._groups, *(result.group for result in self._ready)})
        groups = [
            conversion.GroupInputs(r, image_token_id=self._image_token_id, video_token_id=self._video_token_id)
            for r in requests
        ]
        for inputs in groups:
            self._check_fits(inputs)
        for inputs in groups:
            group = inputs.request.group
            tracks = [_Track(group, index) for index in range(len(inputs.request.seeds))]
            media = inputs.media_hashes if inputs.request.keep_vision else []
            self._groups[group] = _Group(inputs, tracks, media=media, vision_due=bool(media))
            self._scheduler.embeddings.want(media)
            self._start(tracks[0], inputs)

    @_engine_call
    def step(self) -> list[GroupResult]:
        """One scheduler step (a prefill or a decode); returns groups completed by it, ordered by group id."""
        self._steps += 1
        results = [dataclasses.replace(result, decode_step=self._steps) for result in self._ready]
        self._ready = []
        if self._groups:
            reqs = self._scheduler.step()
            if reqs is None:
                raise RunFailedError(f"the rollout has nothing to run, unfinished groups: {sorted(self._groups)}")
            self._find_vision()
            results = sorted(results + self._take_in(reqs), key=lambda result: result.group)
            self._settle()
        return results

    def take_vision(self) -> list[VisionOutput]:
        """Vision outputs found since the last call."""
        found, self._vision = self._vision, []
        return found

    def has_work(self) -> bool:
        """True while any submitted request is unfinished."""
        return bool(self._groups or self._ready)

    @_engine_call
    def abort(self, groups: Sequence[int] | None = None) -> list[GroupResult]:
        """Stop the groups named (all, if None); returns them with the partial responses so far.

        A response that never started has no tokens. Raises ValueError for an unknown group.
        """
        known = {*self._groups, *(result.group for result in self._ready)}
        chosen = known if groups is None else set(groups)
        if chosen - known:
            raise ValueError(f"no such group: {sorted(chosen - known)}")
        self._drain()
        for number in chosen & self._groups.keys():
            group = self._groups[number]
            group.siblings_wait = False
            for track in group.tracks:
                if track.response is None:
                    if track.req is not None and not track.req.finished():
                        self._scheduler.drop(track.req)
                    self._finish(track)
        self._ready += self._collect(chosen & self._groups.keys())
        results = sorted((r for r in self._ready if r.group in chosen), key=lambda result: result.group)
        self._ready = [r for r in self._ready if r.group not in chosen]
        self._settle()
        return results

    @_engine_call
    def pause(self) -> None:
        """Give back the KV of running requests, keeping their tokens and log-probs; `step` resumes them."""
        self._drain()
        self._scheduler.retract_running()
        self._settle()

    @_engine_call
    def drop_caches(self) -> None:
        """Forget every prompt, in the KV pool and among the vision embeddings: nothing of them is read again.

        Raises ValueError while requests hold KV: `pause` first.
        """
        self._flush("drop_caches")

    @_engine_call
    def publish(self) -> None:
        """The weights were rewritten in place: drop every cache computed under the old ones.

        Raises ValueError while requests hold KV: `pause` first.
        """
        self._flush("publish")
        self._version += 1
        for track in self._by_rid.values():
            track.versions.append((len(track.req.output_ids), self._version))

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards; a second call does nothing."""
        if not self._closed:
            self._close()

    @_engine_call
    def _close(self) -> None:
        from rollplex_cli.engines.rollout import build

        self._closed = True
        self._groups.clear()
        self._by_rid.clear()
        self._scheduler = None
        build.release()
        SglangRollout._alive = False
        gc.collect()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _flush(self, call: str) -> None:
        if self._scheduler.holds_kv:
            raise ValueError(f"`{call}` needs an idle or paused engine")
        self._scheduler.flush()
        self._vision = []

    def _take_in(self, reqs: Sequence[Any]) -> list[GroupResult]:
        """Groups completed by what a step of the scheduler left on `reqs`."""
        touched: set[int] = set()
        for req in reqs:
            track = self._by_rid.get(req.rid)
            if track is None or not req.output_ids:
                continue
            if track.cached_tokens is None:
                track.cached_tokens = int(req.cached_tokens)
                touched.add(track.group)
            if req.finished():
                self._finish(track)
                touched.add(track.group)
        return self._collect(touched)

    def _find_vision(self) -> None:
        """What the tower has put out of groups that wait for it."""
        for number, group in self._groups.items():
            if group.vision_due and (pieces := self._scheduler.embeddings.pieces_of(group.media)) is not None:
                group.vision_due = False
                self._vision.append(VisionOutput(group=number, pieces=pieces, ready=self._scheduler.launched()))

    def _drain(self) -> None:
        """Take in what is under way; afterwards requests can be stopped."""
        self._ready += self._take_in(self._scheduler.drain())

    def _settle(self) -> None:
        if not self._groups:
            self._scheduler.settle()

    def _check_fits(self, inputs: Any) -> None:
        prompt = inputs.request.input.num_tokens
        longest = max(inputs.limit(i) for i in range(len(inputs.request.seeds)))
        if prompt + longest > self._capacity:
            raise UsageError(
                f"group {inputs.request.group} can never run: {prompt} prompt and {longest} response tokens, "
                f"limit of prompt and response together: {self._capacity}",
                hint="raise `rollout.kv_tokens` (or the model's context length), or lower `rollout.max_new_tokens`",
            )

    def _start(self, track: _Track, inputs: Any) -> None:
        rid = f"{track.group}.{track.index}.{self._serial}"
        self._serial += 1
        self._scheduler.handle_generate_request(inputs.build(rid, track.index, self._vocab_size))
        track.req = self._scheduler.waiting_queue[-1]
        assert track.req.rid == rid
        assert track.req.to_finish is None, track.req.to_finish
        track.versions.append((0, self._version))
        self._by_rid[rid] = track

    def _finish(self, track: _Track) -> None:
        if track.req is None:
            track.response = Response(
                token_ids=(), logprobs=(), weight_versions=(), finish_reason="abort", cached_tokens=0
            )
            return
        track.response = _response(track)  # may raise: the track must still be known then
        del self._by_rid[track.req.rid]
        track.req = None

    def _collect(self, touched: set[int]) -> list[GroupResult]:
        results: list[GroupResult] = []
        for number in sorted(touched):
            group = self._groups[number]
            if group.siblings_wait:
                # The leader has its first token, so its prompt is in the prefix cache.
                group.siblings_wait = False
                leader = group.tracks[0].req
                if group.inputs.request.keep_prefix and leader is not None:
                    group.prefix = self._scheduler.prompt_key_values(leader)
                for track in group.tracks[1:]:
                    self._start(track, group.inputs)
            responses = tuple(t.response for t in group.tracks if t.response is not None)
            if len(responses) == len(group.tracks):
                del self._groups[number]
                self._scheduler.embeddings.give_up(group.media)
                results.append(
                    GroupResult(group=number, responses=responses, decode_step=self._steps, prefix=group.prefix)
                )
        return results


_FINISH: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


def _response(track: _Track) -> Response:
    req = track.req
    token_ids = tuple(req.output_ids_through_stop)
    logprobs = tuple(req.logprob.output_token_logprobs_val[: len(token_ids)])
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteError(f"a sampled log-prob is not finite, group {track.group}, response: {track.index}")
    assert len(logprobs) == len(token_ids)
    versions: list[int] = []
    ends = [start for start, _ in track.versions[1:]] + [len(token_ids)]
    for (start, version), end in zip(track.versions, ends, strict=True):
        versions += [version] * (end - start)
    return Response(
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=tuple(versions),
        finish_reason=_FINISH[req.finished_reason.to_json()["type"]],
        cached_tokens=track.cached_tokens or 0,
    )


def _replica_layout(options: RolloutOptions) -> tuple[tuple[tuple[int, ...], ...], int]:
    """(global ranks of every replica, this rank's place in its own)."""
    if not dist.is_initialized():
        raise ValueError("the rollout engine needs the default process group")
    world, rank = dist.get_world_size(), dist.get_rank()
    replicas = options.replicas or tuple((r,) for r in range(world))
    members = [r for ranks in replicas for r in ranks]
    if len(set(members)) != len(members) or rank not in members or not set(members) <= set(range(world)):
        raise ValueError(f"replicas must hold rank {rank} and any rank of 0..{world - 1} once, got: {replicas}")
    if len({len(ranks) for ranks in replicas}) != 1:
        raise ValueError(f"replicas must have equal sizes, got: {replicas}")
    own = next(ranks for ranks in replicas if rank in ranks)
    return replicas, own.index(rank)


if TYPE_CHECKING:
    _conforms: type[RolloutEngine] = SglangRollout
