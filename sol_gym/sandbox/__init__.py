"""The executor: a judge that owns everything that counts, and workers that own nothing.

Three processes take part in an evaluation (docs/design.md, Trust). The *judge* holds inputs,
expected outputs, randomness and the clock. The *zygote* has imported torch and triton and nothing
else, and forks one fresh *worker* per evaluation, inside namespaces. The worker's code is the
package `worker/`, which imports only the standard library, numpy and torch; it is loaded without
sol_gym on its path.
"""
