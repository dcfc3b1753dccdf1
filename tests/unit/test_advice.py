"""Advice in README and docs/ starts: every scheme that a clause or a table names beside a ZeRO
stage passes the checks of start-up, on the nodes that its heading, column or clause is about.

Results, formats and the changelog advise nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hjson
import pytest

from ds_quant.config.presets import preset_names
from ds_quant.config.schema import KEY, ConfigError, parse, parse_block
from ds_quant.policy import refusals
from ds_quant.policy.choosing import Place, autotune_candidates, candidates

ROOT = Path(__file__).resolve().parents[2]
NO_ADVICE = {"changelog", "results", "peer_suite", "reproducing", "wire_format", "architecture"}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [page for page in PAGES if page.stem not in NO_ADVICE]

CLAUSE = re.compile(r"(?<=[.:;])\s+|, (?:or )?(?=`)")
STAGES = re.compile(r"(?:ZeRO-|`?zero_optimization\.stage`? )([123](?:(?:/| or | and )[123])*)")
ALONE = re.compile(r"(?:one|1) (?:GPU|rank)s? per (?:node|machine)|\b\d+ x 1\b", re.IGNORECASE)
BLOCK = re.compile(r"^```(json|diff|hjson)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Advice(NamedTuple):
    """A scheme under a stage, on two nodes of so many ranks; replica: with allow_full_replica."""

    page: str
    scheme: str
    stage: int
    node_size: int
    replica: bool = False


def advice_of(text: str, about: str, page: str) -> Iterator[Advice]:
    """Pair every scheme of a clause with the stages that the clause names."""
    names = {*preset_names(), "autotune"}
    schemes = [name for name in re.findall(r'`"?(\w+)"?`', text) if name in names]
    stages = {int(stage) for found in STAGES.findall(text) for stage in re.findall(r"\d", found)}
    node_size = 1 if ALONE.search(f"{about} {text}") else 2
    for scheme in schemes:
        for stage in sorted(stages):
            yield Advice(page, scheme, stage, node_size, "`allow_full_replica`" in text)


def rows(lines: list[str]) -> Iterator[tuple[str, str]]:
    """(head of its column or beginning of its row, cell) of the cells of a table."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    head, _, *body = cells
    for row in body:
        yield from zip(head, row, strict=False)
        yield "", " ".join(row)


def advices(page: Path) -> Iterator[Advice]:
    heading = ""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", text):
        lines = paragraph.strip().splitlines()
        if lines and lines[0].startswith("#"):
            heading = lines.pop(0)
        if lines and lines[0].startswith("|"):
            for title, cell in rows(lines):
                for clause in cell.split(";"):
                    stated = clause if STAGES.search(clause) else f"{title} {clause}"
                    yield from advice_of(stated, f"{heading} {title}", page.name)
            continue
        for clause in CLAUSE.split(" ".join(lines)):
            yield from advice_of(clause, heading, page.name)


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
