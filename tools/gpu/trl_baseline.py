"""A loop one would write today with TRL's GRPOTrainer, on the work of a benchmark: samples a second side by side.

    python tools/gpu/trl_baseline.py --workload clevrer --bench jobs/bench/results/h200-1-qwen25vl7b-clevrer.json
    python tools/gpu/trl_baseline.py --model tiny --device cpu --workload star --prompts 2 --steps 1 --micro-batch 2

What it runs: TRL 1.16 on one GPU, whole model trained, generation by transformers' `generate` (TRL's own default; vLLM
is not used), gradient checkpointing, SDPA attention, AdamW in BF16 without FP32 masters (with masters a 7B model does
not fit one GPU in TRL; the product keeps them on the host). The reference is a second copy on the GPU. Prompts are text
of as many tokens as the benchmark's, also where the benchmark's hold a video: random weights take any tokens, and TRL's
vision path would want processor and videos. So the vision tower costs nothing here, which flatters TRL. Lengths of
responses are those of the benchmark, forced by a logits processor. Random weights; rewards are coin flips.

Needs trl, accelerate, datasets and pandas, which are no dependencies of the project. A line each on stdout, JSON last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from decode_check import model_folder, revision  # noqa: E402

from rollplex_cli.core.seeds import derive_seed  # noqa: E402
from rollplex_cli.plan.workloads import WORKLOADS  # noqa: E402
from rollplex_cli.profile.load import load_profile  # noqa: E402

WARM_UP_STEPS = 1
WORDS = range(16, 200)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b", help="a bundled configuration")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workload", default="clevrer", choices=sorted(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=4, help="prompt groups a step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of one forward and backward")
    parser.add_argument("--bench", type=Path, help="result of `rollplex bench --json` or of sweep.py to compare with")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    return parser.parse_args()


def plan_work(arguments: argparse.Namespace, profile: Any, bench: dict[str, Any] | None) -> list[list[tuple[int, Any]]]:
    """[step][prompt]: (prompt tokens, lengths of its responses), drawn as the benchmark draws them."""
    workload, seed = WORKLOADS[arguments.workload], profile.runtime.seed
    rows = next(iter(bench["raw"].values())) if bench else []
    work = []
    for step in range(WARM_UP_STEPS + arguments.steps):
        known = rows[step - WARM_UP_STEPS]["prompt_tokens"] if 0 <= step - WARM_UP_STEPS < len(rows) else None
        if known is not None and len(known) != arguments.prompts:
            raise SystemExit(f"the benchmark had {len(known)} prompts a step: set `--prompts`")
        groups = []
        for group in range(arguments.prompts):
            lengths = random.Random(derive_seed(seed, "lengths", step, group))
            prompt = random.Random(derive_seed(seed, "workload", step, group))
            drawn = workload.draw_prompt_tokens(prompt, profile.data.max_prompt_tokens)
            responses = [
                workload.draw_response_tokens(lengths, profile.rollout.max_new_tokens)
                for _ in range(profile.rollout.group_size)
            ]
            groups.append((known[group] if known else drawn, responses))
        work.append(groups)
    return work


def tokenizer_of(vocab_size: int, eos: int, pad: int) -> Any:
    """One word a token id, so that a prompt has exactly the tokens wanted."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=f"w{eos}", pad_token=f"w{pad}", unk_token="w0", padding_side="left"
    )


class ForcedLengths:
    """A logits processor: row r ends after its own number of tokens, and never earlier."""

    def __init__(self, lengths: list[int], prompt_tokens: int, eos: int, banned: list[int]) -> None:
        self.lengths, self.prompt_tokens, self.eos, self.banned = lengths, prompt_tokens, eos, banned

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores [rows, vocabulary] of the next token after `input_ids` [rows, tokens]."""
        import torch

        drawn = input_ids.shape[1] - self.prompt_tokens
        last = torch.tensor([drawn >= length - 1 for length in self.lengths], device=scores.device)
        scores[:, self.banned] = -torch.inf
        scores[:, self.eos] = -torch.inf
        only_eos = torch.full_like(scores, -torch.inf)
        only_eos[:, self.eos] = 0.0
        return torch.where(last.unsqueeze(1), only_eos, scores)


def train(arguments: argparse.Namespace, profile: Any, work: list[list[tuple[int, Any]]], folder: Path) -> list[float]:
    """Seconds of each measured step."""
    import torch

    from rollplex_cli.data.compat import ensure_torchvision

    ensure_torchvision()  # before transformers looks for it
    from datasets import Dataset
    from transformers import AutoConfig, LogitsProcessorList, Qwen2_5_VLForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    cuda = arguments.device == "cuda"
    config = AutoConfig.from_pretrained(folder)
    vocab_size = config.get_text_config().vocab_size
    media = [config.image_token_id, config.video_token_id]
    eos, pad = (i for i in range(vocab_size - 8, vocab_size - 6))

    def build() -> Any:
        with torch.device(arguments.device):
            return Qwen2_5_VLForConditionalGeneration._from_config(
                config, dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation="sdpa"
            )

    def reference(*_args: object, **_kwargs: object) -> Any:
        copy = build()
        copy.load_state_dict(model.state_dict())
        return copy

    grpo_trainer.create_model_from_path = reference  # there is no checkpoint to load it from
    model, group_size = build(), profile.rollout.group_size
    generate, calls, samples = model.generate, iter(work), arguments.prompts * group_size

    def forced(*args: Any, **kwargs: Any) -> Any:
        lengths = [length for _, responses in next(calls) for length in responses]
        processor = ForcedLengths(lengths, kwargs["input_ids"].shape[1], eos, media)
        if len(lengths) != kwargs["input_ids"].shape[0]:
            raise RuntimeError(f"{kwargs['input_ids'].shape[0]} rows to generate, expected {len(lengths)}")
        return generate(*args, logits_processor=LogitsProcessorList([processor]), **kwargs)

    model.generate = forced
    ends: list[float] = []

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *_args: object, **_kwargs: object) -> None:
            """After the optimizer's step."""
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.monotonic())
            if len(ends) > 1:
                print(f"step {len(ends)}: {ends[-1] - ends[-2]:.2f} s", flush=True)

    rng = random.Random(0)
    texts = [" ".join(f"w{rng.choice(WORDS)}" for _ in range(tokens)) for groups in work for tokens, _ in groups]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_kwargs: [float(rng.random() < 0.5) for _ in completions],
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=arguments.micro_batch,
            gradient_accumulation_steps=samples // arguments.micro_batch,
            num_generations=group_size,
            max_completion_length=profile.rollout.max_new_tokens,
            max_steps=len(work),
            shuffle_dataset=False,
            beta=profile.algorithm.kl_coef,
            temperature=profile.rollout.temperature,
            learning_rate=1e-6,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=True,
            optim="adamw_torch_fused",
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer_of(vocab_size, eos, pad),
        callbacks=[Clock()],
    )
    trainer.train()
    print(f"TRL logged: {trainer.state.log_history[-2]}", file=sys.stderr)
    return [b - a for a, b in itertools.pairwise(ends)]


def main() -> None:
    """Train a few steps, compare."""
    arguments = parse()
    tiny = arguments.device == "cpu"
    limits = ["rollout.max_new_tokens=16"] if tiny else []  # as sweep.py runs it
    profile = load_profile("tiny" if tiny else "qwen25vl7b", limits)
    samples = arguments.prompts * profile.rollout.group_size
    if samples % arguments.micro_batch:
        raise SystemExit(f"`--micro-batch` must divide the step's {samples} samples")
    bench = json.loads(arguments.bench.read_text()) if arguments.bench else None
    if bench and bench["results"][0]["workload"] != arguments.workload:
        raise SystemExit(f"the benchmark is of another workload: `{bench['results'][0]['workload']}`")
    work = plan_work(arguments, profile, bench)
    with tempfile.TemporaryDirectory() as folder:
        seconds = train(arguments, profile, work, model_folder(arguments, Path(folder)))
    middle = statistics.median(seconds)
    result: dict[str, Any] = {
        "model": arguments.model, "workload": arguments.workload, "generation": "transformers generate",
        "samples_per_step": samples, "step_s": seconds, "step_s_median": middle, "samples_per_s": samples / middle,
        "prompts": [[tokens for tokens, _ in groups] for groups in work[WARM_UP_STEPS:]],
        "response_tokens": [[n for _, lengths in groups for n in lengths] for groups in work[WARM_UP_STEPS:]],
        "peak_bytes": peak_bytes(arguments), "commit": revision(), "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    print(f"TRL GRPOTrainer, transformers generate: {middle:.2f} s a step, {samples / middle:.2f} samples/s")
    if bench:
        result["rollplex"] = {}
        for row in bench["results"]:
            rate = samples / row["step_s_median"]
            result["rollplex"][row["variant"]] = {"samples_per_s": rate, "over_trl": rate * middle / samples}
            print(f"Rollplex {row['variant']}: {rate:.2f} samples/s, {rate * middle / samples:.2f} times TRL's")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def peak_bytes(arguments: argparse.Namespace) -> int | None:
    """Most device memory that PyTorch held."""
    if arguments.device == "cpu":
        return None
    import torch

    return int(torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main()
