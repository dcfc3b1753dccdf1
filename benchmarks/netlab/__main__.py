"""The lab by hand, from the benchmarks folder:

python -m netlab up 2 --rate 100     # two hosts at 100 Mbit/s
python -m netlab exec 0 ping -c 1 10.77.0.2
python -m netlab rate 2 400
python -m netlab down                # also what a crashed run left behind
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from netlab.lab import Lab, LabError, remove, set_rate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up, rate, execute, _ = map(commands.add_parser, ("up", "rate", "exec", "down"))
    for command in (up, rate):
        command.add_argument("hosts", type=int)
    up.add_argument("--rate", dest="mbits", type=float, help="Mbit/s; default: not shaped")
    rate.add_argument("mbits", type=float, help="Mbit/s; 0: not shaped")
    execute.add_argument("host", type=int)
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    try:
        if args.command == "exec":
            return subprocess.call(Lab(args.host + 1).command(args.host, args.argv))
        if args.command == "down":
            remove()
            return 0
        if args.command == "up":
            Lab(args.hosts).up()
        set_rate(args.hosts, args.mbits or None)
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
