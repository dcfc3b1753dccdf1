"""``python -m ds_quant``: the command, for launchers that start modules."""

import sys

from ds_quant.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
