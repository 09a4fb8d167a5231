"""lib.report: verdicts follow thresholds set beforehand, and no number loses its sample size or source on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lib import report
from lib.errors import UserError
from lib.report import Claim, Part, judge, load_claims, pool, verdict
from lib.runs import ROOT, Measured, Results


def claim(op: str = ">=", value: float | None = 0.85) -> Claim:
    threshold = {"op": op, "value": value}
    return Claim(id="a", paper="rao", text="t", unit="u", paper_value="p", threshold=threshold, scales=["laptop"])


def measured(value: float = 0.85, seed: int = 0, source: str = "live", outcomes: list[float] | None = None) -> Measured:
    return Measured(value=value, n=2, ci95=(0.1, 0.9), seeds=[seed], source=source, outcomes=outcomes)


@pytest.mark.parametrize(
    ("op", "value", "number", "expected"),
    [
        (">=", 0.85, 0.85, "reproduced"),
        (">", 0.85, 0.85, "not reproduced"),
        ("<=", 0.2, 0.2, "reproduced"),
        ("<", 0.2, 0.3, "not reproduced"),
        ("reported", None, 0.0, "reported"),
    ],
)
def test_verdict_compares_with_the_threshold(op, value, number, expected):
    assert verdict(claim(op, value), "laptop", measured(number)) == expected


def test_other_scale_or_no_measurement_is_not_tested_whatever_the_number():
    assert verdict(claim(), "smoke", measured(1.0)) == verdict(claim(), "laptop", None) == "not tested at this scale"


def test_seeds_are_pooled_with_an_interval_over_seeds_and_tasks():
    """Two seeds that always and never succeed: only the draw of seeds varies, so the interval is the whole range."""
    pooled = pool([measured(1.0, 0, outcomes=[1, 1]), measured(0.0, 1, outcomes=[0, 0])])
    assert (pooled.value, pooled.n, pooled.seeds, pooled.ci95) == (0.5, 2, [0, 1], (0.0, 1.0))
    certain = pool([measured(0.5, 0, outcomes=[0.5, 0.5]), measured(0.5, 1, outcomes=[0.5, 0.5])])
    assert certain.ci95 == (0.5, 0.5)
    coin = pool([measured(0.5, seed, outcomes=[0.0, 1.0] * 50) for seed in range(3)])
    assert coin.ci95 == pytest.approx((0.5 - 1.96 * 0.5 / 300**0.5, 0.5 + 1.96 * 0.5 / 300**0.5), abs=0.01)


def test_without_single_outcomes_there_is_a_range_but_no_interval():
    pooled = pool([measured(0.25, 0), measured(0.75, 1)])
    assert pooled.ci95 is None and "range over seeds 0.25 to 0.75" in pooled.note


def test_numbers_of_this_run_outrank_shipped_ones():
    assert pool([measured(0.1, source="shipped"), measured(0.9)]).value == 0.9
    assert pool([measured(0.1, source="shipped")]).source == "shipped"


def test_every_claim_of_the_project_names_a_published_number_with_its_source():
    pairs = load_claims(["rao", "tier", "puppeteer"])
    assert len({one.id for one, _ in pairs}) == len(pairs) >= 14
    assert all(published.source and published.tag for _, published in pairs)
    by_id = {one.id: (one, published) for one, published in pairs}
    hard, published = by_id["rao-recursive-small-hard"]
    assert (hard.threshold.op, hard.threshold.value, published.value) == (">=", 0.85, 0.88)
    assert "Conflict" in published.note


def test_claim_that_nobody_announced_or_that_names_no_number_is_refused(tmp_path):
    part = Part("x", tmp_path, Results(claims={"made-up": measured()}), None)
    with pytest.raises(UserError, match="measured the claim 'made-up', which data/claims.yaml does not hold"):
        judge(["rao"], "laptop", [part])
    (tmp_path / "paper_results.yaml").write_text("rao: {}")
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([claim().model_dump()]))
    with pytest.raises(UserError, match="claim 'a': 'p'"):
        load_claims(["rao"], tmp_path)


def test_page_escapes_what_it_shows_and_needs_nothing_from_outside(tmp_path: Path):
    folder = tmp_path / "part"
    (folder / "trees").mkdir(parents=True)
    (folder / "trees" / "player.html").write_text("")
    (folder / "c.svg").write_text("<svg/>")
    rows = judge(["rao"], "laptop", [Part("x", folder, Results(claims={"rao-depth-at-test": measured(7)}), None)])
    part = Part("a <b>", folder, Results(figures=["c.svg"]), None)
    page = report.render("T & U", "laptop", rows, [part], {"commit": "<abc>"}, tmp_path)
    assert "T &amp; U" in page and "a &lt;b&gt;" in page and "&lt;abc&gt;" in page
    assert 'href="part/trees/player.html"' in page and "data:image/svg+xml;base64," in page
    assert "1 reported" in page and "http" not in page
    with pytest.raises(UserError, match="not a picture"):
        report.render("T", "laptop", rows, [Part("x", folder, Results(figures=["c.gif"]), None)], {}, tmp_path)


def test_second_hand_numbers_say_so():
    published = yaml.safe_load((ROOT / "data" / "paper_results.yaml").read_text())["rao"]
    assert {name for name, row in published.items() if "P" in row["tag"]} == {"textcraft_depth_weights"}
