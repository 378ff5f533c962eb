"""``python -m agentcomm`` is the command ``agentcomm``."""

import sys

from agentcomm.cli import main

sys.exit(main())
