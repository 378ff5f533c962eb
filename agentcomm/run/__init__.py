"""``agentcomm run``: runs a script unchanged, with every DistributedDataParallel hooked.

docs/launcher.md says what happens where.
"""
