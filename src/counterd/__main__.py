"""`python -m counterd` is the daemon."""

import sys

from counterd.cli.daemon import main

sys.exit(main())
