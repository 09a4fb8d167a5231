"""Static HTML of every notebook and README, with an index, and with every internal link checked.

    python -m lib.site     writes site/
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import nbformat

from lib import notebooks
from lib.errors import UserError
from lib.runs import ROOT, write_atomic

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dfe7; --back: #ffffff; --panel: #f5f7fa;
  --link: #0b62b3; --good: #0a7a4b; --bad: #b3261e; --open: #7a6200; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa6b5; --line: #343d4a; --back: #14181e;
  --panel: #1c222b; --link: #6db3f2; --good: #54c795; --bad: #ff8a80; --open: #e0c45c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; } a { color: var(--link); } p { max-width: 46rem; }
.lead, small, .soft { color: var(--soft); }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .6rem; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .6rem .8rem; border-bottom: 1px solid var(--line); }
th { background: var(--panel); font-weight: 600; white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td { font-variant-numeric: tabular-nums; } td small { display: block; }
td:first-child { min-width: 15rem; } td:nth-child(4) { min-width: 12rem; } .verdict { font-weight: 600; }
.reproduced { color: var(--good); } .not-reproduced { color: var(--bad); } .not-tested { color: var(--soft); }
.reported { color: var(--open); }
figure { margin: 1rem 0; } figure img { max-width: 100%; background: #fff; border-radius: .5rem; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; overflow-x: auto;
  font-size: .85rem; line-height: 1.35; }
details { margin: .5rem 0; } summary { cursor: pointer; }
"""
LINK = re.compile(r"""\b(href|src)=(["'])(.*?)\2""", re.S)
ELSEWHERE = re.compile(r"^([a-z][a-z0-9+.-]*:|//)", re.I)
WRITTEN = re.compile(r"<(script|style|pre|textarea)\b.*?</\1>", re.S | re.I)


def page(title: str, body: str) -> str:
    """One self-contained HTML page in the project's look, light or dark as the reader's system is.

    Args:
        title: plain text.
        body: HTML below the heading level of the page.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def notebook_html(path: str | Path) -> str:
    """A notebook, or a Markdown file as a notebook of one cell, as HTML.

    Args:
        path: the `.ipynb` or `.md` file.
    """
    from nbconvert import HTMLExporter

    path = Path(path)
    if path.suffix == ".md":
        cell = nbformat.v4.new_markdown_cell(path.read_text(encoding="utf-8"))
        notebook = nbformat.v4.new_notebook(cells=[cell])
    else:
        notebook = notebooks.load(path)
    text, _ = HTMLExporter().from_notebook_node(notebook, resources={"metadata": {"name": path.stem}})
    return text


def _links(text: str) -> list[str]:
    """Targets of a page's links and pictures that point inside the project; code shown to readers has none."""
    targets = (html.unescape(match[3]) for match in LINK.finditer(WRITTEN.sub("", text)))
    return [target for target in targets if target and not ELSEWHERE.match(target)]


def _retarget(text: str) -> str:
    """Let links to notebooks and Markdown files lead to their HTML."""

    def new(match: re.Match[str]) -> str:
        target = match[3]
        if not ELSEWHERE.match(target):
            target = re.sub(r"\.(ipynb|md)(?=#|$)", ".html", target)
        return f"{match[1]}={match[2]}{target}{match[2]}"

    return LINK.sub(new, text)


def _anchors(text: str) -> set[str]:
    found = re.findall(r"""\b(?:id|name)=(?:"([^"]+)"|'([^']+)')""", text)
    return {unquote(html.unescape(double or single)) for double, single in found}


def title_of(path: Path) -> str:
    """A notebook's or Markdown file's first heading; its file name where there is none."""
    text = path.read_text(encoding="utf-8") if path.suffix == ".md" else notebooks.load(path).cells[0].source
    found = re.search(r"^# +(.+)$", text, re.M)
    return found[1].strip() if found else path.stem


def build(out: str | Path, root: Path = ROOT) -> list[Path]:
    """Write the site: notebooks and READMEs as HTML, files they link to copied beside them, an index.

    Args:
        out: the folder to write, made new.
        root: the project.

    Returns:
        The pages written.

    Raises:
        UserError: links lead nowhere; all of them are named. Nothing is written then.
    """
    sources = sorted(root.glob("README*.md"))
    sources += sorted((root / "notebooks").rglob("*.md")) + notebooks.find(root / "notebooks")
    pages = {path: notebook_html(path) for path in sources}
    copies: set[Path] = set()
    broken: list[str] = []
    for source, text in pages.items():
        for link in _links(text):
            name, _, anchor = link.partition("#")
            target = (source.parent / unquote(name)).resolve() if name else source
            if not target.exists() or not target.is_relative_to(root):
                broken.append(f"{source.relative_to(root)} -> {link}")
            elif target in pages:
                if anchor and unquote(anchor) not in _anchors(pages[target]):
                    broken.append(f"{source.relative_to(root)} -> {link}")
            elif target.is_file():
                copies.add(target)
            else:
                broken.append(f"{source.relative_to(root)} -> {link} (a folder; link to a file in it)")
    if broken:
        raise UserError("These links lead nowhere: " + "; ".join(sorted(set(broken))) + ".")
    out = Path(out)
    if out.exists():
        shutil.rmtree(out)
    written = []
    for source, text in pages.items():
        written.append(out / source.relative_to(root).with_suffix(".html"))
        write_atomic(written[-1], _retarget(text))
    for path in copies:
        target = out / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    write_atomic(out / "index.html", _index(sources, root))
    return [*written, out / "index.html"]


def _index(sources: list[Path], root: Path) -> str:
    rows = []
    for source in sources:
        place = source.relative_to(root).with_suffix(".html").as_posix()
        room = source.parent.relative_to(root).as_posix()
        rows.append(
            f'<tr><td class="soft">{html.escape("" if room == "." else room)}</td>'
            f'<td><a href="{place}">{html.escape(title_of(source))}</a></td></tr>'
        )
    table = f'<div class="wide"><table><tr><th>where</th><th>page</th></tr>{"".join(rows)}</table></div>'
    return page("Notebooks", f'<h1>Notebooks</h1><p class="lead">Every page, in reading order.</p>{table}')


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; exit status 2 and one sentence when a link is broken."""
    parser = argparse.ArgumentParser(prog="python -m lib.site", description="HTML of every notebook, links checked.")
    parser.parse_args(argv)
    try:
        written = build(ROOT / "site")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(written)} pages; start at {written[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
