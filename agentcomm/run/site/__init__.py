"""The folder that ``agentcomm run`` puts before PYTHONPATH, for its ``sitecustomize``."""
