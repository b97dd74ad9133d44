"""Devices and streams of a rank's threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import torch

from rollplex_cli.profile.sharing import parse_policy
from rollplex_cli.runtime.sharing.sharing import Sharing
from rollplex_cli.runtime.sharing.streams import TrainerStreams, highest_priority, total_sms

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile


def device_of(profile: Profile) -> Literal["cpu", "cuda"]:
    """The device a profile runs on here; `auto` takes CUDA where a GPU is visible."""
    wanted = profile.topology.device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def backend_of(device: Literal["cpu", "cuda"]) -> str:
    """Backends of the process group; CPU tensors are exchanged on a GPU machine too."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def gpu_index() -> int:
    """CUDA device of this rank."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def build_sharing(profile: Profile) -> Sharing:
    """How this rank shares its device, by the profile's policy."""
    policy = parse_policy(profile.schedule.policy)
    if device_of(profile) == "cpu":
        return Sharing(policy)
    return Sharing(policy, TrainerStreams(gpu_index()), total_sms(gpu_index()))


def set_up_lane(profile: Profile, lane: str) -> None:
    """Make this thread the lane `lane`: its device and stream, or its share of CPU threads.

    No lane works on the default stream, which every other stream of the same kind would wait for. The rollout's has
    the highest priority: kernels of a captured graph run at the priority of the stream it was captured on, and
    without it decode starves beside the trainer's large kernels.
    """
    if device_of(profile) == "cpu":
        if profile.runtime.torch_threads:
            torch.set_num_threads(profile.runtime.torch_threads)
        return
    torch.cuda.set_device(gpu_index())
    policy = parse_policy(profile.schedule.policy)
    if lane == "rollout" and policy.decode_percent is not None:
        num_sms = total_sms(gpu_index()) * policy.decode_percent // 100
        partition = TrainerStreams(gpu_index()).partition(num_sms, rest=False)
        handle = partition.stream(highest_priority())
        torch.cuda.set_stream(torch.cuda.ExternalStream(handle, device=gpu_index()))
    elif lane == "rollout":
        torch.cuda.set_stream(rollout_stream())
    elif lane == "trainer":
        torch.cuda.set_stream(torch.cuda.Stream())


def rollout_stream() -> torch.cuda.Stream:
    """The stream of the rollout lane: this thread's own where it has one, else a new one of the highest priority."""
    current = torch.cuda.current_stream()
    if current != torch.cuda.default_stream():
        return current
    return torch.cuda.Stream(priority=highest_priority())
