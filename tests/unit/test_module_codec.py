"""Codecs of the user's own: the contract that ``load`` checks, and what it adds to a module."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_quant.codec.bound import decode, decode_sum, encode
from ds_quant.codec.module import ModuleCodec, load
from ds_quant.config.schema import ConfigError, parse_block
from ds_quant.kernels.random_bits import Address

# 16 bits of fp32, rounded up at random: any mistake below is a change of this one.
GOOD = """
import torch

def wire_bytes(numel):
    return -(-2 * numel // 16) * 16

def encode(x, out, uniform):
    bits = x.float().contiguous().view(torch.int32).long()
    finite = x.isfinite()
    up = (uniform() * 65536).long() * finite * (x != 0)
    out.zero_()
    high = ((bits + up) >> 16).to(torch.int16)
    out[:, : 2 * x.shape[1]] = high.view(torch.uint8)

def decode(wire, out):
    high = wire[:, : 2 * out.shape[1]].contiguous().view(torch.int16)
    out.copy_((high.int() << 16).view(torch.float32))
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that can be imported until the test ends; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        (tmp_path / "my_codec.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return "my_codec"

    yield write
    load.cache_clear()
    sys.modules.pop("my_codec", None)


def test_a_good_module_is_a_codec(written) -> None:
    codec = load(written(GOOD))
    assert codec == ModuleCodec("my_codec", None) and len({codec, load("my_codec")}) == 1
    assert codec.name == "my_codec" and codec.wire_bytes(0) == 0 and codec.wire_bytes(9) == 32
    x = torch.randn(3, 9)
    wire, found = torch.empty(3, 32, dtype=torch.uint8), torch.empty(3, 9, dtype=torch.bfloat16)
    encode(codec, x, wire, address=Address(key=3, step=4))
    decode(codec, wire, found)
    assert torch.allclose(found.float(), x, rtol=2**-6)
    total, own = torch.empty(9), torch.ones(9)
    decode_sum(codec, wire[::2], total, scale=0.5, own=(1, own))
    assert torch.equal(total, 0.5 * (found[0].float() + own + found[2].float()))
    decode_sum(codec, wire[:1], total, own=(1, own))
    assert torch.equal(total, found[0].float() + own)
    reference = torch.randn(3, 9)
    encode(codec, x, wire, address=Address(key=3, step=4), base=reference)
    decode(codec, wire, reference, add=True)
    assert torch.allclose(reference, x, atol=2**-5)


def test_no_elements_and_no_rows_never_reach_the_module(written) -> None:
    codec = load(written(GOOD))
    for rows, numel in ((0, 9), (2, 0)):
        wire = torch.empty(rows, codec.wire_bytes(numel), dtype=torch.uint8)
        encode(codec, torch.empty(rows, numel), wire)
        decode(codec, wire, torch.empty(rows, numel))
        total = torch.full((numel,), 3.0)
        decode_sum(codec, wire, total)
        assert not total.any()


def test_random_numbers_are_uniform_and_belong_to_the_address(written) -> None:
    written("kept = []\n" + GOOD.replace("finite = ", "kept.append(uniform())\n    finite = "))
    codec = load("my_codec")
    drawn = codec.functions.kept
    for address in (Address(1, 2), Address(1, 2), Address(1, 3), Address(1, 2, 500)):
        out = torch.empty(1, codec.wire_bytes(5001), dtype=torch.uint8)
        encode(codec, torch.ones(1, 5001), out, address=address)
    first, again, later, elsewhere = drawn[-4:]
    assert first.shape == (1, 5001) and 0 <= first.min() and first.max() < 1
    assert abs(float(first.mean()) - 0.5) < 0.02 and abs(float(first.var()) - 1 / 12) < 0.01
    assert torch.equal(first, again)
    for other in (later, elsewhere, first.flip(1)):
        assert (first == other).float().mean() < 0.01


BEYOND = "    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.shape[1]).fill_(9)\n"
BROKEN = {
    "not importable": ("import no_such_package", "ModuleNotFoundError: No module named 'no_such"),
    "syntax": ("def encode(:", "SyntaxError"),
    "missing": ("def encode(x, out, uniform): pass", "no function wire_bytes and no decode"),
    "size": (GOOD.replace("-(-2 * numel // 16) * 16", "2 * numel"), "wire_bytes(1) is 2: allowed: "
             "a positive multiple of 16"),
    "type": (GOOD.replace("-(-2 *", "1.0 * -(-2 *"), "wire_bytes(1) is 16.0"),
    "shrinks": (GOOD.replace("* 16\n", "* 16 + 16 * (numel % 2)\n", 1), "of one element less"),
    "raises": (GOOD.replace("finite = x.isfinite()", "finite = x.no_such()"),
               "encode((2, 1) float32, (2, 16) uint8, uniform) fails with AttributeError"),
    "unwritten": (GOOD.replace("    out.zero_()\n", ""), "write every byte of `out`"),
    "past": (GOOD.replace("    out.zero_()\n", "    out.zero_()\n" + BEYOND), "writes past `out`"),
    "unaddressed": (GOOD.replace("uniform()", "torch.rand(x.shape)"), "from uniform()"),
    "in place": (GOOD.replace("out.zero_()", "out.zero_(), x.mul_(2)"), "changes x"),
    "partial": (GOOD.replace("out.copy_((", "out[:, 1:] = ((").replace(
        "view(torch.float32))", "view(torch.float32))[:, 1:]"), "write every element of `out`"),
    "rows": (GOOD + "    out -= out.mean(0)\n", "of each row alone"),
    "far off": (GOOD + "    out.neg_()\n", "nothing to do with x"),
    "zeros": (GOOD + "    out += 1e-3\n", "decode of zeros gives"),
    "inf": (GOOD + "    out[out.isinf()] = 1\n", "with one inf gives 1.0: allowed: Inf or NaN"),
    "bf16": (GOOD.replace("x.float()", "x"), "encode((2, 1) bfloat16, "),
    "nan": (GOOD + "    out.nan_to_num_()\n", "with one nan gives 0.0: allowed: NaN"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_contract_is_named_with_the_key(written, source: str, message: str) -> None:
    block = {"weights": {"codec": written(source)}}
    with pytest.raises(ConfigError) as error:
        parse_block(block)
    assert str(error.value).startswith('quantized_comm.weights.codec="my_codec": ')
    assert message in str(error.value) and "allowed: " in str(error.value)


def test_what_a_codec_replaces_is_refused_beside_it(written) -> None:
    written_keys = {"bits": 4, "rounding": "nearest", "returned_bits": 8}
    with pytest.raises(ConfigError) as error:
        parse_block({"gradients": {"codec": written(GOOD), **written_keys}})
    first, second, third = error.value.problems
    assert first.startswith("quantized_comm.gradients.bits=4: no effect with quantized_comm.")
    assert 'gradients.codec="my_codec"' in second and "leave one of them out" in second
    assert third.startswith("quantized_comm.gradients.returned_bits=8: no effect with ")
    with pytest.raises(ConfigError, match="no effect, quantized_comm.weights.enabled=false"):
        parse_block({"scheme": "tlq", "weights": {"codec": "my_codec"}})
