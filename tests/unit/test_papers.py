"""The rows of both papers: committed figures meet their tolerances, and the page says so."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import claims
import papers
import pytest
import quick
import sections
import table2
from claims import CLAIMS, Claim, Point, Results

IDS = [*(f"Q{i}" for i in range(1, 9)), *(f"S{i}" for i in range(1, 14)), "X1", "X2"]
COMMITTED = Results(sections.RESULTS)
BY_ID = {claim.id: claim for claim in CLAIMS}


def test_committed_figures_meet_the_tolerances_and_the_page_is_up_to_date(capsys) -> None:
    assert papers.main(["--check"]) == 0, capsys.readouterr().err


def test_every_claim_has_a_row_with_figures_or_with_what_it_needs() -> None:
    assert [claim.id for claim in CLAIMS] == IDS
    for claim in CLAIMS:
        figures = [point.ours for point in papers.points_of(claim, COMMITTED).values()]
        assert claim.needs or (figures and None not in figures), claim.id
        assert claim.measure or claim.command, claim.id


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_commands_of_the_rows_parse(claim: Claim) -> None:
    if not claim.command:
        return
    words = [word for word in shlex.split(claim.command) if word != "sudo"]
    assert words[0] == "python" and (sections.ROOT / words[1]).exists()
    module = importlib.import_module(Path(words[1]).stem)
    if hasattr(module, "parse_args"):
        assert module.parse_args(words[2:])
    if module.__name__ == "speed":
        args = module.parse_args(words[2:])
        assert all(module.config_of(scheme, 3, 2, args) for scheme in args.schemes)


def test_a_figure_outside_its_tolerance_and_a_reason_that_is_not_needed_are_found(
    tmp_path: Path, capsys
) -> None:
    for path in sections.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    found = json.loads((tmp_path / "papers.json").read_text("utf-8"))
    found["figures"]["S4"]["counterexample, differences"] = 0.5
    (tmp_path / "papers.json").write_text(json.dumps(found), "utf-8")
    assert papers.main(["--check", "--results", str(tmp_path)]) == 1
    assert "S4: its figures do not meet the tolerance (replaced weights" in capsys.readouterr().err
    unneeded = replace(BY_ID["S2"], differs="a reason")
    (problem,) = papers.problems(unneeded, COMMITTED)
    assert problem.endswith("remove `differs`")
    unmet = replace(BY_ID["S3"], differs="")
    (problem,) = papers.problems(unmet, COMMITTED)
    assert "say why in `differs`: 0.14 M parameters: +0.048 +-0.008 %" in problem
    predicted = BY_ID["S13"]
    without_reason = replace(
        predicted,
        needs="",
        points=lambda results: [*predicted.points(results), Point(label="unmeasured")],
    )
    assert papers.problems(without_reason, COMMITTED) == [
        "S13: predicted, and `needs` does not say what it takes",
        "S13: a point without a figure of ours, and nothing in `needs`",
    ]


def test_a_row_of_seconds_is_measured_and_shown(capsys) -> None:
    assert papers.main(["--row", "S6"]) == 0
    shown = capsys.readouterr().out
    assert "## S6" in shown and "TLq-HS alone: 2.37" in shown
    assert quick.sdp4bit_bytes() == COMMITTED.quick("S6")


def test_figures_by_formula_are_those_of_the_committed_file() -> None:
    for claim_id in ("Q6", "Q7", "S5", "S6", "S7", "S10"):
        measure = BY_ID[claim_id].measure
        assert measure is not None
        assert measure() == pytest.approx(COMMITTED.quick(claim_id)), claim_id


def test_bytes_and_one_link_rate_explain_the_speed_ups_of_a_cluster() -> None:
    """The median row of a cluster is met exactly: the rate is its own."""
    for cluster in table2.CLUSTERS:
        gigabits = table2.fitted_gigabits(cluster)
        errors = [
            abs(entry.predicted(gigabits) / entry.speedup - 1)
            for entry in table2.ENTRIES
            if entry.cluster == cluster
        ]
        assert min(errors) < 1e-9 and max(errors) < 0.35


def test_a_loss_is_reached_between_two_points_of_a_curve() -> None:
    curve = [{"step": 10, "held_out": 3.0}, {"step": 20, "held_out": 2.0}]
    assert claims.steps_to(curve, 2.25) == 17.5
    with pytest.raises(ValueError, match=r"does not reach a loss of 1\.0000"):
        claims.steps_to(curve, 1.0)


def test_numbers_have_their_units_and_what_is_unchecked_a_mark() -> None:
    point = Point(label="", theirs=2.2, ours=0.0321, half=0.009, unit="%")
    assert papers.ours(point) == "+0.032 +-0.009 %"
    assert papers.theirs(point, BY_ID["Q4"]) == f"+2.20 % {claims.UNCHECKED}"
    assert papers.theirs(point, BY_ID["S1"]) == "+2.20 %"
