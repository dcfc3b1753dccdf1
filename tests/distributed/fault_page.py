"""docs/faults.md: every row measured anew by ``python -m tests.distributed.fault_page``."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path

import deepspeed
import torch

from tests.distributed.faults import FAULTS, RANKS, TIMEOUT, VICTIM, Aftermath, aftermath
from tests.distributed.network import PHASES, STEPS, measure

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


def introduction() -> str:
    return f"""\
# Faults

Measured by `python -m tests.distributed.fault_page` on {datetime.date.today()}: {os.cpu_count()} \
CPU cores ({platform.machine()}),
torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, gloo. `test_faults.py` and \
`test_network.py` hold every row.

## A rank fails

{RANKS} ranks as 2 nodes of 2; rank {VICTIM} fails in a collective, its receives posted, its sends \
not. Collectives
give up after {TIMEOUT:g} s, the `timeout` of `deepspeed.init_distributed` (10 minutes as shipped,
`DEEPSPEED_TIMEOUT` in minutes); the plugin's own process groups take the same. Seconds are from
the fault until the last other rank has ended with an error. In every row a new job resumes from the
last checkpoint to the losses and weights of the undisturbed run, bit for bit.

"""


NOTE = """\

A rank that is killed while it saves leaves a checkpoint that cannot be read, and DeepSpeed may have
pointed `latest` at it already: rank 0 does so without waiting for the others, with or without this
plugin. The checkpoint before it is intact: load it by its tag.

"""


def failed_row(name: str, after: Aftermath) -> str:
    errors = [after.errors[rank] for rank in sorted(after.errors)]
    named = sum("quantized_comm: rank" in error for error in errors)
    equal = "equal" if after.resumed == after.undisturbed else "DIFFERENT"
    seconds = max(after.seconds.values())
    return f"| {name} | {len(errors)} end, {named} name a rank | {seconds:.1f} | {equal} |"


def page() -> str:
    lines = ["| fault | other ranks | seconds | resumed run |", "| --- | --- | ---: | --- |"]
    lines += [failed_row(name, aftermath(name)) for name in FAULTS]
    network = [
        "## The network is bad",
        "",
        "Two hosts (network namespaces) of two ranks, joined by a cable that delays or drops",
        f"packets of both directions; {STEPS} optimizer steps.",
        "",
        f"| run | {' | '.join(f'{p}, s' for p in PHASES)} | losses | sent again at 1 % loss |",
        f"| --- | {' | '.join('---:' for _ in PHASES)} | --- | ---: |",
    ]
    for run, phases in measure().items():
        seconds = " | ".join(f"{phases[p][1]:.2f}" for p in PHASES)
        same = all(phases[p][0] == phases["undisturbed"][0] for p in PHASES)
        again = phases["1 % loss"][2]
        network.append(f"| {run} | {seconds} | {'equal' if same else 'DIFFERENT'} | {again} |")
    return introduction() + "\n".join([*lines, NOTE + network[0], *network[1:], ""])


if __name__ == "__main__":
    text = page()
    assert not re.search("DIFFERENT", text), text
    PAGE.write_text(text, "utf-8")
