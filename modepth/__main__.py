"""`python -m modepth`: the command, for torchrun -m."""

import sys

from modepth.cli import main

sys.exit(main())
