"""Python programs in forks of one process that has imported the engines.

Most of what a short program with engines takes is their import, four CPU seconds. `run` gives what starting an
interpreter for every program would give, without that: same arguments, own environment, output, session and exit code.
For tests of numbers; what is about the start of processes starts them.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
"""What libraries read while they are imported, as `worker_env` of the launcher has it on a CPU."""
MODULES = (
    "av",
    "deepspeed",
    "rollplex_cli.engines.rollout.build",
    "rollplex_cli.engines.trainer.deepspeed_engine",
    "rollplex_cli.engines.weights.export",
    "rollplex_cli.runtime.assembly.build",
    "rollplex_cli.runtime.bench.measure",
    "rollplex_cli.runtime.bench.run",
    "rollplex_cli.runtime.loop",
    "torch._dynamo",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
)
"""What ranks and scripts import besides SGLang; none of it is run as a program itself."""
STORE = """
import os, sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""
"""Holds the ranks' store, as torchrun does, which outlives each of them."""
TICK_S = 0.005

_server: subprocess.Popen[str] | None = None


def run(
    programs: Sequence[Sequence[object]], env: Mapping[str, str] | None = None, timeout_s: float = 240.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run programs side by side, each given as the interpreter's arguments (`-m MODULE ...`, `-c CODE ...` or a
    script), and wait for all; those that are left at the limit are killed.

    `env` is set on top of this process's own environment.
    """
    return [_ended(*each) for each in _run([(list(map(str, p)), dict(env or {})) for p in programs], timeout_s)]


def run_ranks(
    program: Sequence[object], num_ranks: int, timeout_s: float = 240.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on several ranks with the environment that torchrun would give them."""
    given = list(map(str, program))
    ranks = [
        (
            given,
            {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
            },
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    return [_ended(*each) for each in _run(ranks, timeout_s, store=num_ranks > 1)]


def _ended(given: list[str], code: int, out: str, err: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(given, code, out, err)


def _run(
    programs: list[tuple[list[str], dict[str, str]]], timeout_s: float, *, store: bool = False
) -> list[tuple[list[str], int, str, str]]:
    server = _started()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="rollplex-warm-") as folder:
        asked = {
            "programs": [{"argv": argv, "env": {**os.environ, **ENVIRONMENT, **env}} for argv, env in programs],
            "cwd": os.getcwd(), "folder": folder, "timeout_s": timeout_s, "store": store,
        }  # fmt: skip
        try:
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            assert answer, "it ended"
            codes = json.loads(answer)
        except BaseException:
            close()
            raise
        texts = [[(Path(folder) / f"{i}.{end}").read_text() for end in ("out", "err")] for i in range(len(programs))]
    return [(argv, code, *text) for (argv, _), code, text in zip(programs, codes, texts, strict=True)]


def _started() -> subprocess.Popen[str]:
    global _server
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        atexit.register(close)
    return _server


def close() -> None:
    """End the process, and with it whatever it runs."""
    global _server
    server, _server = _server, None
    if server is not None:
        assert server.stdin is not None
        with contextlib.suppress(OSError):
            server.stdin.close()
        try:
            server.wait(2.0)
        except subprocess.TimeoutExpired:  # it runs something, whose processes end with it
            server.terminate()
            server.wait()


def _serve() -> None:
    """Import, then answer requests until the other side closes."""
    control = os.dup(1)
    os.dup2(2, 1)
    _import()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork takes no thread along"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with os.fdopen(control, "w") as answers:
        for line in sys.stdin:
            answers.write(json.dumps(_answer(json.loads(line))) + "\n")
            answers.flush()


def _import() -> None:
    from rollplex_cli.core.imports import without_collector
    from rollplex_cli.engines.rollout.host import import_sglang, load_model_class
    from rollplex_cli.plan.families import FAMILIES

    with without_collector():
        import_sglang("cpu")
        load_model_class(FAMILIES["qwen2_5_vl"])
        for module in MODULES:
            importlib.import_module(module)


def _answer(asked: dict[str, Any]) -> list[int]:
    folder, pids = Path(asked["folder"]), []
    port = None
    holder = None
    try:
        if asked["store"]:
            holder = _fork({"argv": ["-c", STORE], "env": asked["programs"][0]["env"]}, asked["cwd"], folder / "store")
            port = _first_line(folder / "store.out")
        for index, program in enumerate(asked["programs"]):
            if port is not None:
                program["env"]["MASTER_PORT"] = port
            pids.append(_fork(program, asked["cwd"], folder / str(index)))
        return _wait(pids, asked["timeout_s"])
    finally:
        for pid in [*pids, *([holder] if holder is not None else [])]:
            _kill_session(pid)


def _first_line(path: Path) -> str:
    end = time.monotonic() + 60
    while not path.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(TICK_S)
    return path.read_text().strip()


def _wait(pids: list[int], timeout_s: float) -> list[int]:
    """Exit codes; negative where a signal ended it."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    _kill_session(pid)
        time.sleep(TICK_S)
    return [codes[pid] for pid in pids]


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _fork(program: dict[str, Any], cwd: str, output: Path) -> int:
    """Start a program; returns its process id, which is that of its session, too."""
    files = [os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for end in ("out", "err")]
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        return pid
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate([nothing, *files]):
            os.dup2(file, number)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(program["env"])
        os.chdir(cwd)
        code = _execute(program["argv"])
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _execute(argv: list[str]) -> int:
    """What the interpreter does with these arguments; returns its exit code."""
    import runpy
    import traceback

    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    _serve()
