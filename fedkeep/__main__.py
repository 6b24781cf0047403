"""``python -m fedkeep``, where the command is not on the path."""

import sys

from fedkeep.cli import main

sys.exit(main())
