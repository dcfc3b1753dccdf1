"""``ds_quant doctor``: is everything there, is it on, does it work? Exit code 0 if so."""

from __future__ import annotations

import argparse
import json
import os
import platform


def main(arguments: argparse.Namespace) -> int:
    """Check and print; 1 if there is a problem."""
    import torch

    if not torch.cuda.is_available():
        # DeepSpeed guesses the accelerator from what is installed; the machine has none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ds_quant.tools import checks, environment, selftest

    found = environment.survey()
    found.append(selftest.codecs())
    if not arguments.no_processes:
        found.append(selftest.exchange(arguments.timeout))
    good = checks.healthy(found)
    if arguments.json:
        facts = {"healthy": good, "host": platform.node(), "checks": [vars(c) for c in found]}
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(checks.lines(found)))
        print("healthy" if good else "not healthy: see the lines marked problem")
    return 0 if good else 1
