"""SGLang's Scheduler as a library object: no sockets, no watchdog, stepped by its owner.

Import only after `host.import_sglang`.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.mem_cache.common import release_kv_cache

from rollplex_cli.engines.lora import fused
from rollplex_cli.engines.rollout import patches
from rollplex_cli.engines.rollout.vision import KeptEmbeddings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rollplex_cli.engines.lora.adapters import LoraSettings
    from rollplex_cli.engines.rollout.args import Rebind


class _NoOutput:
    """Takes the place of the streamer that sends every token to other processes: results are read off the requests."""

    def stream_output(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing listens."""


class HostedScheduler(Scheduler):
    """A Scheduler whose loop is `step`, called by one thread.

    Running ahead (SGLang's overlap schedule) a step launches its batch before it reads the tokens of the one before, so
    the device never waits for Python. Which batches run depends on the requests alone either way.
    """

    running_batch: Any
    """Requests being decoded; finished ones stay in it until the next step."""
    last_batch: Any
    """The batch of the last step, or `None`."""
    waiting_queue: list[Any]
    chunked_req: Any
    """The request whose prompt is partly prefilled, or `None`."""
    enable_overlap: bool
    """Whether a step runs ahead."""
    result_queue: deque[Any]
    """(batch, its results) launched and not taken in, oldest first."""
    schedule_stream: Any
    """Where batches are prepared; running ahead, another stream than the one they run on."""

    def __init__(
        self, server_args: Any, *, gpu_id: int, tp_rank: int, rebind: Rebind | None, lora: LoraSettings | None = None,
        vision_cache_bytes: int,
    ) -> None:  # fmt: skip
        self._rebind, self._lora = rebind, lora
        self.launch: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Around the launch of every batch."""
        super().__init__(
            server_args,
            SimpleNamespace(nccl_port=0),
            gpu_id=gpu_id,
            tp_rank=tp_rank,
            moe_ep_rank=0,
            pp_rank=0,
            attn_cp_rank=0,
            moe_dp_rank=0,
            dp_rank=None,
        )
        # Set now, not at construction, where it would override PyTorch operators for the whole process. All that
        # is left of it is that batches carry the seeds of their requests.
        server_args.override("rollplex", enable_deterministic_inference=True)
        self.embeddings = mm_utils.embedding_cache = KeptEmbeddings(vision_cache_bytes)

    def init_ipc_channels(self, port_args: Any) -> None:
        """No sockets: nothing is received, and what is sent goes nowhere."""
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=SenderWrapper(None),
            send_to_detokenizer=SenderWrapper(None),
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None

    def init_output_streamer(self) -> None:
        """Results are read off the requests."""
        self.output_streamer = _NoOutput()

    def init_overlap(self) -> None:
        """Streams of SGLang's overlap schedule: batches run on the stream current now, on which the decode graphs are
        captured, and what prepares them and copies their results has its priority."""
        if not self.enable_overlap:
            super().init_overlap()
            self.result_queue = deque()
            return
        module = torch.get_device_module(self.device)
        self.forward_stream = self.tp_worker.model_runner.forward_stream = module.current_stream()
        super().init_overlap()
        self.result_queue = deque()
        self._war_barrier_enabled = self.device == "cuda"
        if self.device == "cuda":
            taken = [self.forward_stream]
            for _ in range(2):
                # Streams come from a pool of 32 in turn, so a new one may be one of those in use.
                stream = torch.cuda.Stream(priority=self.forward_stream.priority)
                while stream in taken:
                    stream = torch.cuda.Stream(priority=self.forward_stream.priority)
                taken.append(stream)
            _, self.schedule_stream, self.copy_stream = taken
            self.copy_stream_ctx = torch.cuda.stream(self.copy_stream)
        else:
            self.schedule_stream = self.forward_stream

    def init_tp_model_worker(self) -> None:
        """Load the model, then place its weights before pools and decode graphs take their addresses."""
        super().init_tp_model_worker()
        model = self.model
        if self._lora is not None:
            fused.attach(model, self._lora)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_(False)
        if self._rebind is not None:
            placed = self._rebind({name: parameter.data for name, parameter in parameters.items()})
            for name, parameter in parameters.items():
                parameter.data = _checked(name, parameter.data, placed[name])
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the pool is sized by what the device has free, and nothing else runs yet
        patches.linear_patch_embed(model.visual.patch_embed)
        patches.tower_norms(model.visual)

    @property
    def model(self) -> Any:
        """SGLang's model module."""
        return self.tp_worker.model_runner.model

    @torch.no_grad()
    def step(self) -> list[Any] | None:
        """Launch one batch (a prefill or a decode) and take in results: its own, or, running ahead, the last one's.

        Returns the requests whose results were taken in, `None` if there was nothing to launch or to take in.
        """
        batch = self._next_batch()
        if batch is None:
            # Dropping the last finished request of a full batch takes a turn of its own, which runs nothing.
            batch = self._next_batch()
        if batch is None and not self.result_queue:
            return None
        if batch is not None:
            with self.launch():
                result = self.run_batch(batch)
            if self.enable_overlap:
                self._apply_war_barrier()  # what is prepared from now on waits until this forward has read its inputs
            # Preparing the next batch changes this one before its results are read.
            self.result_queue.append((batch.copy() if self.enable_overlap else batch, result))
        reqs = self._take_in(keep=int(self.enable_overlap and batch is not None))
        self.last_batch = batch
        return reqs

    @torch.no_grad()
    def drain(self) -> list[Any]:
        """Take in every result under way; the requests concerned. Afterwards the device is done with all batches."""
        return self._take_in(keep=0)

    def _take_in(self, keep: int) -> list[Any]:
        reqs: list[Any] = []
        while len(self.result_queue) > keep:
            batch, result = self.result_queue.popleft()
            reqs += batch.reqs
            self.process_batch_result(batch, result)
        return reqs

    def _next_batch(self) -> Any:
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch = plan.running_batch
        self.last_batch = None
        return plan.batch_to_run

    def drop(self, req: Any) -> None:
        """End an unfinished request after `drain`, giving back its KV. Its tokens stay readable on it."""
        if any(queued is req for queued in self.waiting_queue):
            self.waiting_queue = [queued for queued in self.waiting_queue if queued is not req]
        else:
            if req is self.chunked_req:
                self.chunked_req = None
            release_kv_cache(req, self.tree_cache, is_insert=False)
        req.finished_reason = FINISH_ABORT()

    def settle(self) -> None:
        """With no live request left, forget the finished ones, which SGLang would do one step later, and wait for the
        batch that was launched before their end was known."""
        self.drain()
        if not self.waiting_queue and self.chunked_req is None:
            self.running_batch.filter_batch()
            self.running_batch.batch_is_full = False
            self.last_batch = None

    def check_idle(self) -> None:
        """SGLang's own idle housekeeping: pool leak checks, which raise, and the reset of its length estimate."""
        self.on_idle()

    @torch.no_grad()
    def prompt_key_values(self, req: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Copies of a running request's keys and values of all prompt positions but the last, by layer, each
        [1, KV heads, P - 1, head_dim]. They are complete when this returns, for any stream."""
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(req.origin_input_ids) - 1].long()
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        pairs = []
        for layer in range(pool.layer_num):
            buffers = (pool.get_key_buffer(layer), pool.get_value_buffer(layer))
            keys, values = (b[slots].transpose(0, 1).unsqueeze(0).contiguous() for b in buffers)
            pairs.append((keys, values))
        if slots.is_cuda:
            torch.cuda.current_stream().synchronize()
        return tuple(pairs)

    def launched(self) -> Any:
        """An event behind all batches launched so far; None where nothing runs ahead of the host."""
        if self.device != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(self.forward_stream if self.enable_overlap else torch.cuda.current_stream())
        return event

    def retract_running(self) -> None:
        """After `drain`: give back the KV of every running request; all go back to the queue with their tokens."""
        # SGLang would take in a result here, and finds none.
        running_ahead, self.enable_overlap = self.enable_overlap, False
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.enable_overlap = running_ahead
        self._engine_paused = False

    @property
    def holds_kv(self) -> bool:
        """True while a request owns KV slots."""
        return not self.running_batch.is_empty() or self.chunked_req is not None or self.last_batch is not None

    def flush(self) -> None:
        """Empty prefix cache, KV pool and vision embeddings. Queued requests stay queued."""
        queued, self.waiting_queue = self.waiting_queue, []
        # Emptying the allocator's cache would synchronise the device under the trainer's feet: never.
        done = self.flush_cache(empty_cache=False)
        self.waiting_queue = queued
        assert done, "flush while a request owns KV"
        self.embeddings.clear()


def _checked(name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if new.shape != old.shape or new.dtype != old.dtype or not new.is_contiguous():
        raise ValueError(
            f"`rebind` must return a contiguous tensor like {tuple(old.shape)} {old.dtype} for `{name}`, "
            f"got {tuple(new.shape)} {new.dtype}"
        )
    return new
