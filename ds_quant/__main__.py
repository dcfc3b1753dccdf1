"""``python -m ds_quant``: the command, where a launcher starts modules."""

import sys

from ds_quant.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
