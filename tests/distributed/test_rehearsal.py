"""The rehearsal launches every variant of a kernel that training launches, and before it.

Without a GPU the variants are those that the launcher asks for: every use of a kernel is also
handed to it, with a runner that writes down the macros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_quant.kernels import dispatch, launch, launch_batch, launch_lossless
from ds_quant.kernels.launch import Own
from ds_quant.zero.warmup import warm_up
from tests.distributed.harness import run
from tests.distributed.models import build, settings, train_step

pytestmark = pytest.mark.distributed

LEARNED = {"rounding": "nearest", "levels": "learned", "level_steps": [1]}
SCHEMES: tuple[dict[str, Any], ...] = (
    {"scheme": "qsdp"},
    {"scheme": "qsdp_w4g4", "weights": LEARNED},
    {"scheme": "sdp4bit", "gradients": {"rotation_signs": True}},
    {"scheme": "zeropp"},
    {"scheme": "qw4"},
    {"scheme": "lossless", "gradients": {"enabled": True}},
)


class Recorder:
    """Hands every use of a kernel to the launcher too."""

    def __init__(self) -> None:
        self.variants: set[tuple] = set()
        self.originals = {n: getattr(dispatch, n) for n in ("encode", "decode", "decode_sum")}
        for name, original in self.originals.items():
            setattr(dispatch, name, self._both(getattr(launch, name), original))
        encode = dispatch.encode_lossless
        dispatch.encode_lossless = self._both(launch_lossless.encode, encode)
        decode = dispatch.decode_lossless
        dispatch.decode_lossless = lambda *args: self._decode_lossless(decode, *args)
        compile_tasks = dispatch.compile_tasks
        dispatch.compile_tasks = lambda *args: self._compile(compile_tasks, *args)
        recode = dispatch.recode
        dispatch.recode = lambda *args, **options: self._recode(recode, *args, **options)

    def _note(self, work: Any) -> None:
        self.variants.add((work.kernel, work.macros))

    def _both(self, launched: Any, original: Any) -> Any:
        def use(*args: Any, **options: Any) -> None:
            own = options.get("own")
            as_launched = options | ({"own": Own(*own)} if own is not None else {})
            launched(*args, run=self._note, **as_launched)
            original(*args, **options)

        return use

    def _decode_lossless(self, original: Any, *args: Any) -> None:
        def note(tables: Any) -> None:
            for table in tables:
                self._note(table.alone() if table.num_jobs == 1 else table)

        launch_lossless.decode_rows(*args, run_tables=note)
        original(*args)

    def _compile(self, original: Any, tasks: Any, buffers: Any) -> Any:
        """Tables of operations: variants of the same macros, which the rehearsal uses as well."""
        if all(launch_batch.covers(operation, buffers) for operation, _ in tasks):
            for table in launch_batch.tables_of(tasks, buffers):
                macros = tuple(pair for pair in table.macros if pair != ("DSQ_TABLE", 1))
                self.variants.add((table.kernel, macros))
        return original(tasks, buffers)

    def _recode(self, original: Any, wire, out, source, fmt, *, own, **options: Any) -> None:
        given = None if own is None else Own(*own)
        where = wire.unsqueeze(0), out.view(1, -1)
        launch.recode(*where, source, fmt, own=given, run=self._note, **options)
        # On CUDA this is one kernel: what the reference does instead is not launched.
        before = set(self.variants)
        original(wire, out, source, fmt, own=own, **options)
        self.variants = before


def _variants(stage: int, block: dict[str, Any]) -> tuple[set, set]:
    """(rehearsed, launched by three optimizer steps)."""
    # Buckets of few owners under ZeRO-2: there, ranks also deliver sums to each other.
    zero = {"reduce_bucket_size": 20_000} if stage == 2 else {}
    engine = build(settings(stage, block | {"allow_full_replica": True}, dtype="bf16", zero=zero))
    recorder = Recorder()
    warm_up(engine.ds_quant_engine, torch.device("cpu"))
    rehearsed, recorder.variants = recorder.variants, set()
    for step in range(3):
        train_step(engine, step)
    return rehearsed, recorder.variants


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("block", SCHEMES, ids=lambda block: block["scheme"])
def test_training_launches_nothing_new(block: dict[str, Any], stage: int) -> None:
    node_size = (1, 2, 4)[(SCHEMES.index(block) + stage) % 3]  # each scheme and stage has all
    for rehearsed, launched in run(_variants, 4, stage, block | {"node_size": node_size}):
        new = launched - rehearsed
        assert not new, "\n".join(f"{kernel}: {dict(macros)}" for kernel, macros in sorted(new))
        assert launched
