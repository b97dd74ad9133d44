"""The profile: every setting of a job, validated and frozen.

Field documentation is the string under the field, with its unit and its effect.
Validation of single values is declared here; checks across fields live in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rollplex_cli.profile.sections.algorithm import AlgorithmProfile
from rollplex_cli.profile.sections.lora import LoraProfile
from rollplex_cli.profile.sections.reuse import ReuseProfile
from rollplex_cli.profile.sections.schedule import ScheduleProfile
from rollplex_cli.profile.types import (
    STRICT,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskProfile:
    """What is learned: a folder with `task.py` (see jobs/tasks/shapes)."""

    name: str
    """Name of a folder under jobs/tasks, or a path to one."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Passed to the task's functions unchanged."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelProfile:
    """Which model, and where its first weights come from."""

    config: str
    """A bundled configuration (`tiny`, `qwen25vl3b`, `qwen25vl7b`, `qwen25vl32b`, `qwen25vl72b`; of other families
    `tiny-qwen2vl`, `tiny-qwen3vl`, `qwen2vl7b`, `qwen3vl4b`, `qwen3vl8b`) or a checkpoint folder."""
    init: Literal["checkpoint", "random", "cold_start"] = "checkpoint"
    """`checkpoint` loads weights from the folder `config`; `random` draws them; `cold_start` draws them and
    trains them on the task's own answers first."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations. Masters, moments and gradients are float32 in any case."""
    trust_remote_code: bool = False
    freeze_vision: bool = False
    """Keep the vision tower with its projector as it is: no gradients, no optimizer state, no backward through it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TopologyProfile:
    """How ranks are laid out. One rank is one process and, where there are GPUs, one GPU."""

    num_nodes: PositiveInt = 1
    ranks_per_node: PositiveInt = 1
    train_tp: PositiveInt = 1
    """Tensor-parallel degree of the trainer; divides the number of ranks that train (half of them under `disagg`)."""
    rollout_tp: PositiveInt = 1
    """Tensor-parallel degree of one rollout replica; divides `train_tp`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where a GPU is visible. Large profiles say `cuda` so that a laptop refuses them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataProfile:
    """Limits on prompts and media."""

    fps: PositiveFloat = 2.0
    """Frames sampled per second of video."""
    max_frames: PositiveInt = 64
    min_pixels: PositiveInt = 784
    max_pixels: PositiveInt = 602112
    """Per frame, after resizing."""
    max_prompt_tokens: PositiveInt = 8192
    """No longer prompt is trained on; nothing is ever cut."""
    on_long_prompt: Literal["error", "skip"] = "error"
    """A prompt that is too long ends the run with the row's name, or another row takes its place."""
    min_frames: PositiveInt = 2
    """A clip too short for `fps` shows at least this many of its frames, if it has them."""
    total_pixels: PositiveInt | None = None
    """Pixels of all frames of a video together; long clips get smaller frames. `null` sets no limit but
    `max_frames` x `max_pixels`."""
    frame_sampling: Literal["processor", "qwen_vl_utils"] = "processor"
    """Which frames are shown: as the Hugging Face processor chooses them (frame i * N / n), or as `qwen-vl-utils`
    does (evenly from the first frame to the last)."""
    on_bad_media: Literal["error", "skip"] = "error"
    """`skip` reports a row whose media cannot be read and takes another in its place."""
    max_bad_rows: PositiveInt = 1000
    """With `skip`: the run ends when more rows than this were left out."""
    num_workers: NonNegativeInt = 1
    """Decode and preprocess this many prompts at a time ahead of the step; 0 does it in the step."""
    worker_kind: Literal["thread", "process"] = "thread"
    """Processes survive crashes and hangs of a decoder and share no interpreter lock; each loads the processor
    (some seconds and 0.5 GiB)."""
    prefetch_steps: PositiveInt = 2
    """How many steps ahead prompts are built."""
    decode_timeout_s: PositiveFloat = 120.0
    """With `process`: a row that takes longer counts as bad media."""
    cache_gib: NonNegativeFloat = 1.0
    """Built prompts with their pixels are kept in host memory up to this size, per rank."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutProfile:
    """How responses are generated."""

    group_size: PositiveInt = 8
    """Responses per prompt (G)."""
    max_new_tokens: PositiveInt = 2048
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 keeps every token."""
    max_running_requests: PositiveInt = 256
    """Requests decoded in one batch."""
    kv_tokens: PositiveInt = 65536
    """Capacity of the rollout's KV pool, in tokens per rank."""
    chunked_prefill_tokens: PositiveInt = 8192
    run_ahead: bool = True
    """On a GPU, launch each batch before the tokens of the one before are read, so that decode never waits for Python.
    The tokens are the same; no effect on the CPU."""
    extra_groups: NonNegativeInt = 0
    """Prompt groups a rank has in flight beyond its share of `algorithm.prompts_per_step`: a step ends when its share
    is complete, and does not wait for the longest responses. What is left goes on in the next step."""
    keep_partial: bool = False
    """Groups left unfinished go on from the tokens they have; otherwise they are drawn anew under the new weights.
    Kept tokens are dropped where a checkpoint is written or an evaluation runs."""
    max_carries: PositiveInt = 2
    """A group left unfinished so often is waited for."""
    stale_tokens: Literal["correct", "mask"] = "correct"
    """Tokens drawn under older weights: their ratio is to the weights that drew them, or they are not learned from."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardProfile:
    """What a response earns. `reward: file.py:function` alone is short for that one part with weight 1."""

    parts: dict[str, float] = Field(default_factory=dict)
    """Weights by reward type (`auto`, `exact`, `multiple_choice`, `numerical`, `regression`, `ocr`, `free_text`,
    `math`, `format`, `think_format`) or `file.py:function`. Without any, the task's own function is the reward."""
    num_workers: PositiveInt = 2
    """Processes for functions of one's own and for `math`."""
    timeout_s: PositiveFloat = 30.0
    """Limit on one call in a worker process, which is killed and replaced."""
    on_error: Literal["error", "zero"] = "error"
    """A function that fails ends the run with its name, or its call counts 0 and `reward_errors` grows."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerProfile:
    """AdamW on host FP32 state."""

    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = 0
    """Linear warm-up, constant afterwards."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0
    """Global gradient norm, computed in FP32."""
    chunk_elements: Annotated[int, Field(ge=64, multiple_of=64)] = 16_777_216
    """Elements updated at a time; results do not depend on it."""
    master: Literal["full", "split"] = "full"
    """What the host keeps of the FP32 master weights: all of them, or only the 16 bits that the device's BF16 weights
    lack, which saves 2 bytes per parameter on the host and on the link each way. Results and checkpoints are the
    same."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ColdStartProfile:
    """Supervised steps on the true answers before RL; used where `model.init` is `cold_start`."""

    lr: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 20
    batch_size: PositiveInt = 16
    max_steps: PositiveInt = 250
    test_from_step: NonNegativeInt = 60
    test_every: PositiveInt = 10
    stop_accuracy: Fraction = 0.5
    """Sampled accuracy on the validation split at which the cold start ends."""
    stop_accuracy_each_kind: Fraction = 0.33
    test_clips: PositiveInt = 48
    test_samples: PositiveInt = 4


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TargetProfile:
    """When a run counts as successful; without one it runs `runtime.max_steps` and exits 0."""

    reward_mean: float
    """Mean reward over the last `window` steps that must be reached."""
    window: PositiveInt = 10
    stop: bool = True
    """End the run when the target is reached."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationProfile:
    """Answers on the held-out split: before the first step, every `every_steps`, and after the last."""

    num_samples: NonNegativeInt = 0
    """0 turns evaluation off."""
    every_steps: NonNegativeInt = 0
    """0 evaluates only before the first and after the last step."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    num_responses: PositiveInt = 1
    """Responses per sample; figures are means over all of them."""
    max_new_tokens: PositiveInt | None = None
    """`null` takes `rollout.max_new_tokens`."""
    best_metric: str | None = None
    """Keep the checkpoint with the highest held-out figure of this name (`reward`, `accuracy`, or a reward part)
    besides the newest ones, and name it in `checkpoints/best`. `null` keeps none: then no figure decides anything."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GuardsProfile:
    """What stops a run that looks healthy and is wrong."""

    parity_limit: PositiveFloat = 0.1
    """Largest mean absolute difference between rollout and trainer log-probs of the same tokens."""
    zero_reward_steps: PositiveInt = 10
    """Steps in a row in which every reward is zero before the run stops."""
    check_publish: bool = False
    """Compare the weights of all ranks, byte by byte, after every update; reads everything on the host."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggingProfile:
    """Where figures and responses go besides `metrics.jsonl` and the console."""

    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (`pip install wandb`); `offline` writes to the run folder and sends nothing."""
    wandb_project: str = "rollplex"
    rollouts_every: NonNegativeInt = 1
    """Steps between dumps of all responses to `rollouts/`; 0 keeps none."""
    pictures: bool = True
    """Draw curves and timeline when the run ends, in a second or two; `rollplex report` draws them at any time."""
    token_logprobs: bool = False
    """Whether dumps hold the log-probs of every token, of rollout and trainer."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MemoryProfile:
    """What lies in device memory when, within which budgets; a budget of `None` takes what the machine has."""

    budget_gib: PositiveFloat | None = None
    """Device memory of a rank: everything, the CUDA context included. On a CPU: what lies in regions."""
    host_budget_gib: PositiveFloat | None = None
    """Host memory of a node's ranks together."""
    residency: Literal["managed", "resident"] = "managed"
    """`managed`: an object has memory between its first and its last use in a step. `resident`: always. Results are
    equal."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RuntimeProfile:
    """Everything about the run itself."""

    seed: NonNegativeInt = 0
    max_steps: PositiveInt = 100
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints; 0 writes one only at the end and when interrupted."""
    keep_checkpoints: PositiveInt = 2
    stall_timeout_s: PositiveFloat = 600.0
    """A run in which no task finishes for this long stops and names what each rank waits for."""
    start_timeout_s: PositiveFloat = 1800.0
    """The same for what comes before the first step, such as building an engine; at least `stall_timeout_s`."""
    torch_threads: NonNegativeInt = 1
    """CPU threads of each of the two lanes; 0 leaves PyTorch's default. Results are bit-equal for equal values only."""
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Rendezvous port; 0 picks a free one."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """A whole job."""

    name: str
    description: str = ""
    task: TaskProfile
    model: ModelProfile
    lora: LoraProfile | None = None
    topology: TopologyProfile = Field(default_factory=TopologyProfile)
    data: DataProfile = Field(default_factory=DataProfile)
    rollout: RolloutProfile = Field(default_factory=RolloutProfile)
    reward: RewardProfile = Field(default_factory=RewardProfile)
    algorithm: AlgorithmProfile = Field(default_factory=AlgorithmProfile)
    optimizer: OptimizerProfile = Field(default_factory=OptimizerProfile)
    schedule: ScheduleProfile = Field(default_factory=ScheduleProfile)
    reuse: ReuseProfile = Field(default_factory=ReuseProfile)
    cold_start: ColdStartProfile = Field(default_factory=ColdStartProfile)
    target: TargetProfile | None = None
    evaluation: EvaluationProfile = Field(default_factory=EvaluationProfile)
    guards: GuardsProfile = Field(default_factory=GuardsProfile)
    logging: LoggingProfile = Field(default_factory=LoggingProfile)
    memory: MemoryProfile = Field(default_factory=MemoryProfile)
    runtime: RuntimeProfile = Field(default_factory=RuntimeProfile)

    @property
    def num_ranks(self) -> int:
        """World size: one process per rank."""
        return self.topology.num_nodes * self.topology.ranks_per_node

    @property
    def frozen_vision(self) -> bool:
        """Whether nothing trains the vision tower."""
        return self.model.freeze_vision or self.lora is not None

    @property
    def disaggregated(self) -> bool:
        """Whether half of the ranks decode and the other half train."""
        return self.schedule.name == "disagg"

    @property
    def prefix_pack_tokens(self) -> int:
        """Prompt tokens of a pass of several prompts, no longer than the longest prompt, for which there is memory; 0
        where prompts run alone: where a step has several updates, or groups that are not known at its start."""
        algorithm = self.algorithm
        several = algorithm.num_minibatches * algorithm.num_epochs > 1
        if several or algorithm.max_refills or self.rollout.extra_groups:
            return 0
        return min(self.schedule.prefix_pack_tokens, self.data.max_prompt_tokens)

    @property
    def rollout_beside_training(self) -> bool:
        """Whether a rollout of several ranks decodes while the same ranks train: both then launch collectives."""
        return self.topology.rollout_tp > 1 and self.schedule.name == "rollplex"

    def orders_launches(self, device: str) -> bool:
        """Whether the ranks of a rollout replica launch in one order on `device`, `cpu` or `cuda`."""
        wanted = self.schedule.launch_order
        return self.rollout_beside_training and (wanted == "always" or (wanted == "auto" and device == "cuda"))

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel training groups."""
        return (self.num_ranks // 2 if self.disaggregated else self.num_ranks) // self.topology.train_tp
