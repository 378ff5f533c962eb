"""Variables of the environment by which the processes of a run know of each other.

A module of its own, without imports: what runs at exit must not run ``exec`` (as dataclasses do),
by which Python forgets that a KeyboardInterrupt is to end it by a signal.
"""

PREFIX = "AGENTCOMM_"
LAUNCHER_PID = f"{PREFIX}LAUNCHER_PID"  # the process that the user started
PARTS = f"{PREFIX}PARTS"  # where the parts are kept: the report or a file that is removed again
REPORT = f"{PREFIX}REPORT"
LOG = f"{PREFIX}LOG"
