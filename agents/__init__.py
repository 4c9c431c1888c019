"""The optimizer: agents that search for kernels and thereby produce baselines.

Nothing is here yet. The cheapest optimizer, the fastest of the reference and torch.compile of it,
is part of the baselines (`sol_gym.evaluate.baseline`) until agents take it over.
"""
