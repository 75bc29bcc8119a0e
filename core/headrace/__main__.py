"""`python -m headrace`: the command line, for environments whose scripts are not on the PATH."""

from __future__ import annotations

import sys

from headrace.cli import main

sys.exit(main())
