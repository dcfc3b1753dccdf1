"""Whether the CUDA kernels work here: compiles one, runs it, shows the whole traceback if not.

python benchmarks/gpu/probe.py --json probe.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from ds_quant.kernels import cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.monotonic()
    failure = cuda.failure_of(torch.device("cuda", 0))
    document = {
        "works": failure is None,
        "seconds": time.monotonic() - start,  # compiling included
        "reason": None if failure is None else failure.reason,
        "traceback": None if failure is None else failure.traceback,
    }
    document["shown"] = [document["reason"] or f"kernels work, {document['seconds']:.1f} s"]
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(document["traceback"] or document["shown"][0])
    if failure is not None and args.device == "cuda":
        sys.exit("probe.py: CUDA tensors would take the torch path")


if __name__ == "__main__":
    main()
