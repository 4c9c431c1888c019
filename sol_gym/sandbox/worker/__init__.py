"""The worker's side of the sandbox: standard library, numpy and torch only.

These modules are loaded by the zygote under the name `_sol_gym_worker`, without sol_gym on the
import path, so that a candidate cannot import the judge. `wire` and `cuda` are used by the judge too.
"""
