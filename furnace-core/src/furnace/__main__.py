"""``python -m furnace`` is the command ``furnace``."""

import sys

from furnace.cli import main

if __name__ == "__main__":
    sys.exit(main())
