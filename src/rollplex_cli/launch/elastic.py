"""torchrun that does not outlive its supervisor: `python -m rollplex_cli.launch.elastic TORCHRUN-ARGUMENTS`.

If the supervisor is killed, the kernel sends SIGQUIT here and torchrun ends its workers. Every other request to stop is
the supervisor's to handle: a scheduler signals all processes of a job at once, and a torchrun that ended on it would
take the ranks' store away while they write their checkpoint.
"""

from __future__ import annotations

import ctypes
import importlib
import signal

from rollplex_cli.core.imports import without_collector

PR_SET_PDEATHSIG = 1
ENDED_BY = signal.SIGQUIT
"""The one signal that torchrun is told to handle (`worker_argv`)."""
PASSED_OVER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def end_with_parent() -> None:
    """Ask the kernel for `ENDED_BY` when the parent process dies; does nothing where there is no such call."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ENDED_BY, 0, 0, 0)
    except (AttributeError, OSError):
        return


def main() -> None:
    """Run torchrun with this process's arguments."""
    for number in PASSED_OVER:
        # A handler and not SIG_IGN, which the workers would inherit: they must hear.
        signal.signal(number, lambda _number, _frame: None)
    end_with_parent()
    # By name, not by import: the launcher's own modules load no torch.
    with without_collector():
        torchrun = importlib.import_module("torch.distributed.run")
    torchrun.main()


if __name__ == "__main__":
    main()
