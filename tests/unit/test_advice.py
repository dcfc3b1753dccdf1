"""Advice in README and docs/ starts: every scheme that they advise passes the checks of start-up.

Results, formats and the changelog advise nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import hjson
import pytest

from ds_quant.config.schema import KEY, ConfigError, parse, parse_block
from ds_quant.policy import refusals
from ds_quant.policy.choosing import Place, autotune_candidates, candidates
from tests.unit.advice import PAGES, ROOT, Advice, advice_of, advices

BLOCK = re.compile(r"^```(json|diff|hjson)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ADVICES = sorted({advice for page in PAGES for advice in advices(page)})


def start(advice: Advice) -> None:
    """Raise ConfigError if start-up refuses what is advised."""
    block = {"scheme": advice.scheme, "node_size": advice.node_size}
    block |= {"allow_full_replica": True} if advice.replica else {}
    schemes = [advice.scheme]
    if advice.scheme == "autotune":
        schemes = candidates(Place(advice.stage, 2, advice.node_size, advice.replica))
    for scheme in schemes:
        config = {"zero_optimization": {"stage": advice.stage}, KEY: {**block, "scheme": scheme}}
        parsed = parse(config)
        refusals.refuse(config, parsed)
        if advice.stage == 3:
            world = 2 * advice.node_size
            refusals.refuse_full_replica(
                parsed, world=world, node_size=advice.node_size, model_bytes=None
            )


@pytest.mark.parametrize("advice", ADVICES, ids=lambda advice: "-".join(map(str, advice)))
def test_what_a_page_advises_starts(advice: Advice) -> None:
    start(advice)


def test_advice_of_sentences_and_tables_is_found() -> None:
    wanted = {
        Advice("hybrid.md", "lossless", 2, 1),
        Advice("hybrid.md", "full_precision", 3, 1),
        Advice("hybrid.md", "lossless", 3, 1, replica=True),
        Advice("choosing.md", "qsdp", 3, 1),
        Advice("choosing.md", "eden4", 2, 1),
        Advice("README.md", "eden4", 2, 1),
        Advice("README.md", "eden4", 3, 2),
        Advice("troubleshooting.md", "lossless", 2, 2),
    }
    assert wanted <= set(ADVICES), wanted - set(ADVICES)


def test_advice_that_start_up_refuses_is_told_apart() -> None:
    (wrong,) = {a for a in advice_of("take `lossless` under ZeRO-2 or 3", "## One GPU per node", "")
                if a.stage == 3}  # fmt: skip
    with pytest.raises(ConfigError, match="needs two GPUs per node or more"):
        start(wrong)


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """DeepSpeed configs, or parts of one, in the code blocks of the pages, with a diff's lines."""
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text("utf-8")):
            if language == "diff":
                body = "\n".join(line[1:] for line in body.splitlines() if line[0] in " +")
            if KEY in body:
                text = body.strip().rstrip(",")
                yield page.name, hjson.loads(text if text.startswith("{") else f"{{{text}}}")


CONFIGS = list(configs())


@pytest.mark.parametrize("place", range(len(CONFIGS)), ids=lambda place: CONFIGS[place][0])
def test_configs_of_the_pages_start(place: int) -> None:
    _, config = CONFIGS[place]
    assert {"README.md", "hybrid.md", "running.md"} <= {page for page, _ in CONFIGS}
    block = parse(config, load_codecs=False)
    if "zero_optimization" in config:
        refusals.refuse(config, block)


LOGGED = re.compile(r"^quantized_comm: (\w+) on ZeRO-(\d)", re.MULTILINE)  # scheme, stage


@pytest.mark.parametrize("name", ["README.md", "docs/hybrid.md"])
def test_the_line_shown_is_of_the_block_shown_before_it(name: str) -> None:
    """It names the scheme and the stage of the config."""
    text = (ROOT / name).read_text("utf-8")
    shown = text[: LOGGED.search(text).start()]
    _, body = [found for found in BLOCK.findall(shown) if KEY in found[1]][-1]
    (stage,) = re.findall(r'"stage": (\d)', body)
    (scheme,) = re.findall(r'"scheme": "(\w+)"', body)
    lines = LOGGED.findall(text.partition("```text")[2].partition("```")[0])
    schemes = {scheme}
    if scheme == "autotune":  # the line names what was chosen
        schemes = set(autotune_candidates(Place(int(stage), nodes=2, node_size=8)))
    assert schemes & {logged_scheme for logged_scheme, _ in lines}
    assert {logged_stage for _, logged_stage in lines} == {stage}
    assert parse_block({"scheme": scheme}).scheme == scheme
