"""Build the project's own environment, `.venv`, with the package set for this machine.

    python3 tools/setup_env.py            (or: make setup)

Environment:
    ROLLPLEX_DEVICE   `cpu` or `gpu`; without it `gpu` is taken where `nvidia-smi` lists a device
    PIP_*             pip's own settings, such as an index that offers CPU builds of torch

The lists of packages are those of pyproject.toml. Nothing is installed when neither they, the device nor the Python
version changed since the last time. This file uses the standard library only and parses under any Python 3, so that
an old one gets a message instead of a syntax error.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "rollplex-setup.json"
LOG = VENV / "rollplex-setup.log"
OLDEST = (3, 11)
START = (
    "import sys, torch.distributed.run, rollplex_cli.runtime.loop, rollplex_cli.runtime.assembly.build; "
    "from rollplex_cli.engines.rollout.host import import_sglang; import_sglang(sys.argv[1]); "
    "import rollplex_cli.engines.rollout.build, rollplex_cli.runtime.assembly.build_trainer"
)
"""What launcher and ranks import when they start."""


class SetupError(Exception):
    """A fault for the user: what is wrong, and a hint of what to do."""

    def __init__(self, message, hint):
        super().__init__(message)
        self.message = message
        self.hint = hint


def find_python():
    """Path of a Python of at least version OLDEST: the running one, else the first on PATH."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in range(20, OLDEST[1] - 1, -1):
        found = shutil.which("python3.%d" % minor)
        if found and subprocess.run([found, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            return found
    raise SetupError(
        "Python %d.%d or newer is needed, found: %s" % (*OLDEST, sys.version.split()[0]),
        "install one and run `make setup PYTHON=python3.12`, for example",
    )


def choose_device():
    """`gpu` or `cpu`: what ROLLPLEX_DEVICE says, else whether `nvidia-smi` lists a device."""
    wanted = os.environ.get("ROLLPLEX_DEVICE", "").lower()
    if wanted in ("gpu", "cuda"):
        return "gpu"
    if wanted == "cpu":
        return "cpu"
    if wanted:
        raise SetupError("`ROLLPLEX_DEVICE` must be `cpu` or `gpu`, got: %s" % wanted, "unset it to detect the device")
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "cpu"
    listed = subprocess.run([smi, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return "gpu" if listed.returncode == 0 and b"GPU" in listed.stdout else "cpu"


def read_packages(device):
    """(requirements, requirements to install without their dependencies, fingerprint) for `device`."""
    import tomllib

    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    extras = project["optional-dependencies"]
    bare_names = set(document["tool"]["rollplex"]["setup"]["no-deps"]) if device == "cpu" else set()
    wanted = project["dependencies"] + extras[device] + extras["dev"]
    bare = [item for item in wanted if re.split(r"[^A-Za-z0-9._-]", item, maxsplit=1)[0] in bare_names]
    full = [item for item in wanted if item not in bare]
    parts = [document["build-system"], project, sorted(bare_names), device, sys.version, str(ROOT)]
    text = json.dumps(parts, sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return full, bare, hashlib.sha256(text.encode()).hexdigest()


def up_to_date(fingerprint):
    """True when `.venv` was completed with this fingerprint."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stamp.get("fingerprint") == fingerprint and (VENV / "bin" / "rollplex").exists()


def environment_of(**more):
    """The environment of what runs here: this one, but bytecode is written even where an image forbids it."""
    return {name: value for name, value in dict(os.environ, **more).items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_logged(label, command, **environment):
    """Run `command` with its output in LOG, showing `label` and the seconds it takes.

    Raises SetupError with the last lines of the log when it fails.
    """
    live = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    start = time.monotonic()
    if not live:
        print("setup: %s ..." % label, file=sys.stderr, flush=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.write("\n$ %s\n" % " ".join(str(part) for part in command))
        log.flush()
        child = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=str(ROOT),
            env=environment_of(**environment),
        )
        try:
            while child.poll() is None:
                if live:
                    line = "\rsetup: %s ... %d s" % (label, time.monotonic() - start)
                    print(line, end="", file=sys.stderr, flush=True)
                time.sleep(0.5 if live else 0.1)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    seconds = time.monotonic() - start
    print("%ssetup: %s: %.0f s" % ("\r" if live else "", label, seconds), file=sys.stderr, flush=True)
    if child.returncode != 0:
        lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join("  " + line for line in lines[-12:])
        raise SetupError("%s failed; the log ends with\n%s" % (label, tail), "the whole log: %s" % LOG)


def module_found(python, name):
    """True when `python` can import the module `name`."""
    found = subprocess.run([python, "-c", "import " + name], stderr=subprocess.DEVNULL, check=False)
    return found.returncode == 0


def create_venv():
    """Make `.venv` with pip inside. Debian ships `venv` without `ensurepip`: the system's pip then fills in."""
    if sys.prefix != sys.base_prefix and Path(sys.prefix).resolve() == VENV.resolve():
        raise SetupError("`.venv` cannot rebuild itself: %s" % sys.executable, "run `deactivate` first")
    # A half-made environment or one of another Python is not repaired but made anew.
    if VENV.exists():
        shutil.rmtree(str(VENV))
    VENV.mkdir()
    if module_found(sys.executable, "ensurepip"):
        run_logged("make .venv", [sys.executable, "-m", "venv", VENV])
        return
    if not module_found(sys.executable, "pip") or not module_found(sys.executable, "venv"):
        raise SetupError(
            "this Python has no `ensurepip` and no `pip`: %s" % sys.executable,
            "on Debian and Ubuntu: `apt-get install python3-venv python3-pip`",
        )
    run_logged("make .venv", [sys.executable, "-m", "venv", "--without-pip", VENV])
    run_logged(
        "put pip into .venv",
        [sys.executable, "-m", "pip", "--python", VENV / "bin" / "python", "install", "--quiet", "pip"],
    )


def venv_usable():
    """True when `.venv` has this very Python version and a pip that runs."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return False
    probe = "import sys, pip; print(sys.version)"
    answer = subprocess.run(
        [str(python), "-c", probe],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        text=True,
    )
    return answer.returncode == 0 and answer.stdout.strip() == sys.version.strip()


def install(device, full, bare):
    """Install all packages, then the project itself in editable form."""
    # Byte-compiling 20,000 files costs more than compiling the few that are imported when they first are.
    pip = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    # DeepSpeed is a source distribution: without this it would compile kernels that are not used.
    label = "install the %s packages (minutes the first time)" % device
    run_logged(label, [*pip, *full], DS_BUILD_OPS="0")
    if bare:
        run_logged("install the rollout engine", [*pip, "--no-deps", *bare])
    run_logged("install rollplex", [*pip, "--no-deps", "--editable", ROOT])
    # Where nothing may be written later every process of every run would compile it again: seconds for PyTorch alone.
    run_logged("compile what a run imports", [pip[0], "-c", START, "cuda" if device == "gpu" else "cpu"])


def main():
    """Bring `.venv` up to date; returns the exit code."""
    start = time.monotonic()
    try:
        python = find_python()
        if sys.version_info < OLDEST:
            return subprocess.call([python, str(Path(__file__).resolve())])
        device = choose_device()
        full, bare, fingerprint = read_packages(device)
        if up_to_date(fingerprint):
            return 0
        if not venv_usable():
            create_venv()
        STAMP.unlink(missing_ok=True)
        install(device, full, bare)
        STAMP.write_text(json.dumps({"fingerprint": fingerprint, "device": device}) + "\n", encoding="utf-8")
    except SetupError as error:
        print("error: %s\n\nhint: %s" % (error.message, error.hint), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; `make setup` goes on where it stopped", file=sys.stderr)
        return 130
    print("setup: .venv is ready (%s, %.0f s)" % (device, time.monotonic() - start), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
