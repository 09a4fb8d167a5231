"""The page of a reproduction: each claim beside the paper's number, the measured one and a verdict fixed beforehand."""

from __future__ import annotations

import base64
import html
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from lib.errors import UserError
from lib.evaluate import interval
from lib.runs import ROOT, Measured, Results
from lib.site import page

POLICY = {"smoke": "micro policy", "laptop": "micro policy", "smol": "SmolLM2-135M", "paper": "the paper's models"}
COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
PICTURES = {".png": "image/png", ".svg": "image/svg+xml"}
REPRODUCED, NOT_REPRODUCED, REPORTED = "reproduced", "not reproduced", "reported"
NOT_TESTED = "not tested at this scale"


class Threshold(BaseModel):
    """`op` compares the measured value with `value`; `reported` gives no verdict."""

    model_config = ConfigDict(extra="forbid")
    op: Literal[">=", ">", "<=", "<", "reported"]
    value: float | None = None


class Claim(BaseModel):
    """One row of `data/claims.yaml`."""

    model_config = ConfigDict(extra="forbid")
    id: str
    paper: str
    text: str
    unit: str
    paper_value: str
    threshold: Threshold
    scales: list[str]


class PaperResult(BaseModel):
    """One number of `data/paper_results.yaml`, with who states it."""

    model_config = ConfigDict(extra="forbid")
    value: float | str
    unit: str
    setting: str
    source: str
    tag: str
    note: str = ""


@dataclass(frozen=True)
class Part:
    """One finished unit of a reproduction, as the page shows it."""

    name: str
    folder: Path
    results: Results
    executed: Path | None


@dataclass(frozen=True)
class Row:
    """One claim, what the paper says of it, what this run measured (None: nothing), and the verdict."""

    claim: Claim
    published: PaperResult
    measured: Measured | None
    verdict: str


def load_claims(papers: Sequence[str], data: Path = ROOT / "data") -> list[tuple[Claim, PaperResult]]:
    """The claims of some papers, each with the paper's own number.

    Args:
        papers: their names.
        data: the folder of `claims.yaml` and `paper_results.yaml`.

    Raises:
        UserError: a row breaks the schema or names a number that is not there.
    """
    published = yaml.safe_load((data / "paper_results.yaml").read_text(encoding="utf-8"))
    pairs = []
    for row in yaml.safe_load((data / "claims.yaml").read_text(encoding="utf-8")):
        try:
            claim = Claim.model_validate(row)
            pairs.append((claim, PaperResult.model_validate(published[claim.paper][claim.paper_value])))
        except (ValidationError, KeyError) as error:
            raise UserError(f"data/claims.yaml, claim '{row.get('id')}': {error}") from error
    return [pair for pair in pairs if pair[0].paper in papers]


def verdict(claim: Claim, scale: str, measured: Measured | None) -> str:
    """Judge a claim by the threshold that stood before the run.

    Args:
        claim: with its threshold and the scales it is tested at.
        scale: of this run.
        measured: None when the run did not measure it.
    """
    if measured is None or scale not in claim.scales:
        return NOT_TESTED
    if claim.threshold.op == REPORTED:
        return REPORTED
    return REPRODUCED if COMPARE[claim.threshold.op](measured.value, claim.threshold.value) else NOT_REPRODUCED


def pool(measured: Sequence[Measured]) -> Measured:
    """One number from several seeds; what was trained in this run outranks what ships.

    The interval is hierarchical: seeds are drawn with replacement, then tasks within each drawn seed. It needs the
    outcomes of single tasks from every seed; without them there is none, and the range over seeds stands in the note.

    Args:
        measured: one per seed.
    """
    live = [one for one in measured if one.source == "live"]
    chosen = live or list(measured)
    if len(chosen) == 1:
        return chosen[0]
    values = [one.value for one in chosen]
    notes = list(dict.fromkeys(one.note for one in chosen if one.note))
    notes.append(f"range over seeds {min(values):.3g} to {max(values):.3g}")
    outcomes = [one.outcomes for one in chosen if one.outcomes]
    return Measured(
        value=sum(values) / len(values),
        n=min(one.n for one in chosen),
        ci95=interval(outcomes) if len(outcomes) == len(chosen) else None,
        seeds=sorted({seed for one in chosen for seed in one.seeds}),
        note="; ".join(notes),
        source=chosen[0].source,
    )


def judge(papers: Sequence[str], scale: str, parts: Sequence[Part], data: Path = ROOT / "data") -> list[Row]:
    """Every claim of some papers with its measurement and verdict.

    Raises:
        UserError: a part measured a claim that `data/claims.yaml` does not hold.
    """
    pairs = load_claims(papers, data)
    known = {claim.id for claim, _ in pairs}
    found: dict[str, list[Measured]] = {}
    for part in parts:
        for name, one in part.results.claims.items():
            if name not in known:
                raise UserError(f"'{part.folder}' measured the claim '{name}', which data/claims.yaml does not hold.")
            found.setdefault(name, []).append(one)
    rows = []
    for claim, published in pairs:
        measured = pool(found[claim.id]) if claim.id in found else None
        rows.append(Row(claim, published, measured, verdict(claim, scale, measured)))
    return rows


def render(
    title: str, scale: str, rows: Sequence[Row], parts: Sequence[Part], facts: Mapping[str, Any], home: Path
) -> str:
    """The page as HTML; figures are inside it, executed notebooks are linked.

    Args:
        title: heading.
        scale: of the run.
        rows: from `judge`.
        parts: the finished units, in order.
        facts: shown at the end, such as commit, versions and command.
        home: the folder the page will stand in, for relative links.
    """
    counts = Counter(row.verdict for row in rows)
    summary = ", ".join(f"{counts[word]} {word}" for word in (REPRODUCED, NOT_REPRODUCED, REPORTED, NOT_TESTED))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="lead">Every measured number is of the <b>{POLICY[scale]}</b> ({scale} scale), '
        f"on tasks not trained on. Claims: {summary}.</p>",
        "<h2>Claims</h2>",
        _claims_table(rows, POLICY[scale]),
        '<p class="soft">Reported: no threshold was set, whatever came out is shown. Intervals are 95 %; with one seed '
        "they cover tasks only, with several seeds and then tasks. Who states the paper's number: P paper text, "
        "S Korean summary, A article, W benchmark page, D podcast notes, C published configurations, I inferred.</p>",
    ]
    for part in parts:
        body.append(f"<h2>{html.escape(part.name)}</h2>")
        if part.executed:
            body.append(f'<p><a href="{_relative(part.executed, home)}">The executed notebook</a></p>')
        else:
            body.append('<p class="soft">Not run here: results as shipped with the repository.</p>')
        body += [_figure(part.folder / name) for name in part.results.figures]
        body.append(_trees(part.folder / "trees", home))
    lines = "\n".join(f"{name}: {value}" for name, value in facts.items())
    body.append(f"<h2>How this was made</h2><pre>{html.escape(lines)}</pre>")
    return page(title, "\n".join(body))


def _relative(path: Path, home: Path) -> str:
    return html.escape(path.resolve().relative_to(home.resolve()).as_posix())


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}" if abs(value) < 10 else f"{value:.4g}"


def _claims_table(rows: Sequence[Row], policy: str) -> str:
    heads = ("claim", "paper", f"measured: {policy}", "n, interval", "verdict")
    lines = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        claim, published = row.claim, row.published
        source = f"[{published.tag}] {published.source}; {published.setting}. {published.note}".strip()
        goal = "" if claim.threshold.op == REPORTED else f"aim {claim.threshold.op} {claim.threshold.value:g}"
        style = {NOT_REPRODUCED: "not-reproduced", NOT_TESTED: "not-tested"}.get(row.verdict, row.verdict)
        lines.append(
            f"<tr><td>{html.escape(claim.text)}<small>{html.escape(claim.unit)}</small></td>"
            f"<td>{html.escape(_number(published.value))}<small>{html.escape(source)}</small></td>"
            f'<td>{"–" if row.measured is None else _number(row.measured.value)}</td>'
            f"<td>{_basis(row.measured)}</td>"
            f'<td><span class="verdict {style}">{row.verdict}</span><small>{html.escape(goal)}</small></td></tr>'
        )
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _basis(measured: Measured | None) -> str:
    """What a number rests on: sample size, interval and what it covers, seeds, where it comes from."""
    if measured is None:
        return ""
    several = len(measured.seeds) > 1
    span = "no interval"
    if measured.ci95:
        low, high = map(_number, measured.ci95)
        span = f"[{low}, {high}]" + ("" if several else " tasks only")
    lines = [f"seed{'s' if several else ''} {', '.join(map(str, measured.seeds))}"]
    if measured.source == "shipped":
        lines.append("from what ships")
    if measured.note:
        lines.append(measured.note)
    smalls = "".join(f"<small>{html.escape(line)}</small>" for line in lines)
    return f"n = {measured.n}{' per seed' if several else ''}, {span}{smalls}"


def _figure(path: Path) -> str:
    kind = PICTURES.get(path.suffix)
    if kind is None or not path.is_file():
        raise UserError(f"'{path}' is not a picture the page can show; results.json may name PNG and SVG files only.")
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(path.stem)}" src="data:{kind};base64,{data}"></figure>'


def _trees(folder: Path, home: Path) -> str:
    """Players (HTML) as links and trees drawn in text, unfolded on demand."""
    lines = [
        f'<p><a href="{_relative(path, home)}">Tree player: {html.escape(path.stem)}</a></p>'
        for path in sorted(folder.glob("*.html"))
        if path.resolve().is_relative_to(home.resolve())
    ]
    for path in sorted(folder.glob("*.txt")):
        text = html.escape(path.read_text(encoding="utf-8"))
        lines.append(f"<details><summary>Tree: {html.escape(path.stem)}</summary><pre>{text}</pre></details>")
    return "\n".join(lines)
