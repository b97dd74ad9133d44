"""Every error a user can meet, with the exit code it ends the program with.

RollplexError (1)
+-- RunFailedError (1)          a run that started and could not go on
|   +-- ParityError (1)         rollout and trainer disagree about the same tokens
|   +-- NonFiniteError (1)      a loss or gradient norm that is not a number
|   +-- StallError (1)          no task finished within `runtime.stall_timeout_s`
|   +-- RewardError (1)         a reward function raised or returned no number
|   +-- PeerFailedError (1)     another rank failed first
|   +-- RankLostError (1)       a rank ended without a word
|   +-- PhaseError (1)          an illegal phase transition
|   +-- LeaseError (1)          a managed object used outside its lifetime
+-- UsageError (2)              arguments or paths that cannot be right
|   +-- ProfileError (2)        one or more faults in a profile
|   +-- DataError (2)           rows or media that cannot be read
|       +-- LongPromptError (2) a prompt of more tokens than the profile allows
+-- DoesNotFitError (3)         this machine or budget cannot hold the job
+-- ClusterError (4)            launcher, port, scheduler or node trouble
+-- TargetNotReachedError (5)   the run ended below the target of its profile
+-- InterruptedRunError (75)    stopped with a checkpoint to resume
"""

from __future__ import annotations


class RollplexError(Exception):
    """A fault with a message for the user.

    Args:
        message: what is wrong, the value last, no trailing period.
        hint: what to do about it, shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[RollplexError], message: str, hint: str | None) -> RollplexError:
    return kind(message, hint=hint)


class RunFailedError(RollplexError):
    """A run that started and could not go on."""


class ParityError(RunFailedError):
    """Rollout and trainer log-probs of the same tokens differ by more than the profile allows."""


class NonFiniteError(RunFailedError):
    """A loss, gradient norm or log-prob that is not finite."""


class StallError(RunFailedError):
    """No task finished within `runtime.stall_timeout_s`."""


class RewardError(RunFailedError):
    """A reward function raised, timed out or returned something that is not a number."""


class PeerFailedError(RunFailedError):
    """Another rank failed first; this one stopped with its reason."""


class RankLostError(RunFailedError):
    """A rank's process ended without a word: killed, crashed, or its node is gone. Another start may go well."""


class PhaseError(RunFailedError):
    """A phase transition that the table does not allow."""


class LeaseError(RunFailedError):
    """A managed object used by the wrong task or outside its lifetime."""


class UsageError(RollplexError):
    """Arguments or paths that cannot be right."""

    exit_code = 2


class ProfileError(UsageError):
    """One or more faults in a profile; the message lists all of them."""


class DataError(UsageError):
    """Rows or media that cannot be read."""


class LongPromptError(DataError):
    """A prompt of more tokens than `data.max_prompt_tokens`."""


class DoesNotFitError(RollplexError):
    """This machine or budget cannot hold the job."""

    exit_code = 3


class ClusterError(RollplexError):
    """Launcher, port, scheduler or node trouble."""

    exit_code = 4


class TargetNotReachedError(RollplexError):
    """The run ended below the target of its profile."""

    exit_code = 5


class InterruptedRunError(RollplexError):
    """Stopped by a signal or a time limit, with a checkpoint to resume."""

    exit_code = 75
