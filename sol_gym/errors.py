"""The exceptions of sol_gym: one small tree, so that callers can catch by boundary.

A candidate that fails is never an exception: it is an `Evaluation` with a status. Exceptions are
for bad arguments (the caller can mend them) and for broken infrastructure (nobody's kernel is at
fault, so no reward may follow from it).
"""


class SolGymError(Exception):
    """Base of everything sol_gym raises on purpose."""


class ProblemError(SolGymError, ValueError):
    """A problem, workload or reference is malformed or does not exist."""


class SolutionError(SolGymError, ValueError):
    """A solution cannot be read: wrong schema, missing file, bad entry point."""


class DeviceError(SolGymError, ValueError):
    """A device model is unknown or the named hardware is not there."""


class BoundError(SolGymError):
    """The SOL analyzer could not derive a bound."""


class InfrastructureError(SolGymError, RuntimeError):
    """The judge, the zygote or the machine failed. Never turned into a reward."""
