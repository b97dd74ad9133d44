"""torchrun that does not outlive its supervisor: `python -m rollplex_cli.launch.elastic TORCHRUN-ARGUMENTS`.

If the supervisor is killed, the kernel sends SIGTERM here and torchrun ends its workers.
"""

from __future__ import annotations

import ctypes
import runpy
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent process dies; does nothing where there is no such call."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (AttributeError, OSError):
        return


def main() -> None:
    """Run torchrun with this process's arguments."""
    end_with_parent()
    # By name, not by import: the launcher's own modules load no torch.
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
