"""`python -m iris_core` is the command `iris`."""

import sys

from iris_core.cli import main

sys.exit(main())
