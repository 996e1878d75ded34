"""`python -m paceline` is the command."""

import sys

from paceline.cli import main

sys.exit(main())
