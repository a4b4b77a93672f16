"""``python -m mlflashpoint``: the ``mlflashpoint`` command."""

import sys

from mlflashpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
