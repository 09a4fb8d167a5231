"""Step through episodes: the order of events, escaped HTML for each node, and a document that needs no kernel.

Everything a model wrote is untrusted. It is escaped here and nowhere else, control characters are shown by name, and
the document's content security policy runs no script but its own and loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import JsonLexer, PythonLexer

from lib import view
from lib.errors import UserError
from lib.tree import Node, Tree

if TYPE_CHECKING:
    from IPython.display import HTML

MOST_CHARACTERS = 6000  # of one prompt, action or observation
PYTHON_LEXER, JSON_LEXER, FORMATTER = PythonLexer(), JsonLexer(), HtmlFormatter(nowrap=True)
CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
CHAT_MARK = re.compile(r"&lt;\|\w+\|&gt;")
# Terminal codes, and marks that reverse or hide text; lone surrogates cannot be written as UTF-8.
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")


@dataclass(frozen=True)
class Step:
    """One event of an episode.

    Args:
        node: id of the node that acts.
        turn: number of its action, None for a node that never acted.
        time: when the action had been sampled, in the unit of `lib.view.clock`.
    """

    node: str
    turn: int | None
    time: float


def episode_steps(tree: Tree) -> list[Step]:
    """All actions of all nodes in the order in which they happened, equal moments in launch order."""
    time = view.clock(tree)
    order = {n.id: k for k, n in enumerate(tree)}
    steps = [Step(n.id, turn, moment) for n in tree for turn, moment in enumerate(time.actions[n.id])]
    steps += [Step(n.id, None, time.start[n.id]) for n in tree if not n.turns]
    return sorted(steps, key=lambda s: (s.time, order[s.node], s.turn or 0))


# -- pieces of HTML ---------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Untrusted text as harmless HTML: markup escaped, invisible characters named, and long texts cut with a note."""
    more = len(text) - MOST_CHARACTERS
    safe = html.escape(_visible(text[:MOST_CHARACTERS]))
    return safe if more <= 0 else f'{safe}<span class="cut"> … {more:,} more characters not shown</span>'


def _as_read(text: str) -> str:
    """What the host wrote, escaped, with the marks of the chat format paled."""
    return CHAT_MARK.sub(r'<span class="chat">\g<0></span>', escape(text))


def _visible(text: str) -> str:
    return INVISIBLE.sub(lambda m: f"⟨U+{ord(m[0]):04X}⟩", text.replace("\r\n", "\n"))


def _code(text: str, lexer: Lexer) -> str:
    """Code with light colours; the highlighter escapes all of it."""
    shown = _visible(text[:MOST_CHARACTERS])
    cut = escape(text)[len(html.escape(shown)) :]
    return f'<pre class="code">{highlight(shown, lexer, FORMATTER).rstrip()}{cut}</pre>'


def _action(text: str) -> str:
    match = CODE.search(text)
    if match is None:
        json_call = text.lstrip().startswith(("{", "["))
        return _code(text, JSON_LEXER) if json_call else f'<pre class="code">{escape(text)}</pre>'
    thought = re.sub(r"</?thought>", "", text[: match.start()]).strip()
    rest = text[match.end() :].strip()
    return "".join([
        f'<div class="thought">{escape(thought)}</div>' if thought else "",
        _code(match[1].strip("\n"), PYTHON_LEXER),
        f"<pre>{escape(rest)}</pre>" if rest else "",
    ])  # fmt: skip


def node_html(node: Node, turn: int | None = None) -> str:
    """The transcript of a node with its numbers and reward terms.

    Args:
        turn: action to mark as current, later ones are paled; None marks nothing.
    """
    facts = [f'<span class="status {node.status}">{node.status.replace("_", " ")}</span>']
    facts += [
        f"<span>{name} {value:.3g}</span>"
        for name, value in (("s̃", node.success), ("R", node.reward), ("A", node.advantage), ("w", node.weight))
        if value is not None
    ]
    facts += [f"<span>{node.tokens_in:,} tokens read</span>", f"<span>{node.tokens_out:,} sampled</span>"]
    terms = node.info.get("reward_terms", {})
    if terms:
        facts.append(
            "<span>R = " + " + ".join(f"{value:.3g} {escape(name)}" for name, value in terms.items()) + "</span>"
        )
    if reason := node.info.get("reason"):
        facts.append(f"<span>{escape(str(reason))}</span>")
    parts, action = [], -1
    for segment in node.segments:
        text = segment.text or f"({len(segment.ids)} tokens; their text was not kept)"
        if segment.trainable:
            action += 1
            state = "" if turn is None or action < turn else " current" if action == turn else " future"
            parts.append(
                f'</div><div class="turn{state}" data-turn="{action}"><div class="label">action {action + 1}</div>'
            )
            parts.append(_action(text))
        elif action < 0:
            parts.append(
                f"<details><summary>prompt, {len(segment.ids):,} tokens</summary><pre>{_as_read(text)}</pre></details>"
            )
        else:
            parts.append(f'<div class="label">observation</div><pre class="seen">{_as_read(text)}</pre>')
    return (
        f'<article data-id="{escape(node.id)}"><header><div class="task">{escape(node.id)} · {escape(node.task)}</div>'
        f'<div class="facts">{"".join(facts)}</div></header><div>{"".join(parts)}</div></article>'
    )


def tree_svg(tree: Tree, color: view.ColorBy = "reward", states: Mapping[str, str] | None = None) -> str:
    """The tree as SVG, laid out and coloured like `lib.plotting.draw_tree`.

    Args:
        states: for a node id the CSS classes of its state: "future", "live", "current".
    """
    spots, labels, values = view.tree_layout(tree), view.node_labels(tree), view.node_values(tree, color)
    scale, states = view.color_scale([tree], color), states or {}
    span = max(x for x, _ in spots.values())
    unit = max(30.0, min(120.0, 430 / (span + 1)))
    margin = max(46.0, (320 - span * unit) / 2)  # room for the labels of a narrow tree
    at = {i: (margin + x * unit, 24 + y * 76) for i, (x, y) in spots.items()}
    width, height = 2 * margin + span * unit, 70 + 76 * tree.depth
    levels: dict[float, list[float]] = {}
    for x, y in at.values():
        levels.setdefault(y, []).append(x)
    edges, nodes = [], []
    for node in tree:
        x, y = at[node.id]
        state, key = states.get(node.id, ""), escape(node.id)
        if node.parent is not None:
            x0, y0 = at[node.parent]
            edges.append(f'<path class="edge {state}" data-id="{key}" d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + 44:.1f} '
                         f'{x:.1f} {y - 44:.1f} {x:.1f} {y:.1f}"/>')  # fmt: skip
        rim, thick, dashes = view.STATUS_EDGE[node.status]
        fill, value = view.shade(values[node.id], scale), values[node.id]
        ink = "#fff" if view.is_dark(fill) else view.INK
        room = int(min((abs(x - other) for other in levels[y] if other != x), default=200.0) / 6.2)
        label = escape(view.clean(labels[node.id], min(room, 24))) if room > 7 else ""
        number = "" if value is None else f"{value:.2g}"
        nodes += [
            f'<g class="node {state}" data-id="{key}"><title>{escape(f"{node.id} {node.task}")}</title>',
            f'<circle class="halo" cx="{x:.1f}" cy="{y:.1f}" r="19"/>',
            f'<circle class="disc" cx="{x:.1f}" cy="{y:.1f}" r="12" fill="{fill}" stroke="{rim}" ',
            f'stroke-width="{thick}" stroke-dasharray="{" ".join(map(str, dashes))}"/>',
            f'<text class="value" x="{x:.1f}" y="{y + 3:.1f}" style="fill:{ink}">{number}</text>',
            f'<text x="{x:.1f}" y="{y + 29:.1f}">{label}</text></g>',
        ]
    return f'<svg width="{width:.0f}" height="{height:.0f}" role="img">{"".join(edges + nodes)}</svg>'


def tree_html(tree: Tree, color: view.ColorBy = "reward", states: Mapping[str, str] | None = None) -> str:
    """The tree in a box that scrolls, with the meaning of its colours and rims below."""
    low, high, colors = view.color_scale([tree], color)
    rims = "".join(
        f'<span><svg width="20" height="8"><path d="M0 4H20" stroke="{rim}" stroke-width="{thick}" '
        f'stroke-dasharray="{" ".join(map(str, dashes))}"/></svg> {status.replace("_", " ")}</span>'
        for status, (rim, thick, dashes) in view.STATUS_EDGE.items()
        if any(n.status == status for n in tree)
    )
    ramp = f'<i style="background:linear-gradient(90deg,{",".join(colors)})"></i>'
    key = f"<span>{view.VALUE_NAME[color]} {low:.2g} {ramp} {high:.2g}</span><span><b></b> acts now</span>{rims}"
    return (
        f'<div class="tree"><div class="scroll">{tree_svg(tree, color, states)}</div><div class="key">{key}</div></div>'
    )


# -- the document -----------------------------------------------------------------------------------------------------


def html_player(
    trees: Sequence[Tree],
    titles: Sequence[str] | None = None,
    heading: str = "Episodes",
    *,
    after: Sequence[Tree] | None = None,
    color: view.ColorBy = "reward",
) -> str:
    """One self-contained HTML document that steps through episodes without a kernel and without a network.

    Arrow keys step, space plays, a click on a node goes to its first action. Texts beyond 6,000 characters are cut,
    with a note.

    Args:
        trees: episodes to choose from; with `after`, those of the earlier policy.
        titles: one per episode; task, sample and success if None.
        after: episodes of the later policy, shown side by side with `trees`.

    Raises:
        UserError: no trees, or another number of titles.
    """
    sides = [("", trees)] if after is None else [("before", trees), ("after", after)]
    script = asset("player.js")
    return Template(asset("player.html")).substitute(
        heading=escape(heading),
        style=asset("player.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        layout="" if after is None else "two",
        panes="".join(_pane(name, side, titles, color) for name, side in sides),
        data=script_json([[_episode_data(tree) for tree in side] for _, side in sides]),
    )


def script_json(data: object) -> str:
    """JSON that may stand inside a script element: without "<" no text can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def episode_titles(trees: Sequence[Tree], titles: Sequence[str] | None) -> list[str]:
    """The given titles, checked, or the tree's task, sample and success.

    Raises:
        UserError: no trees, or another number of titles.
    """
    if not trees:
        raise UserError("a player needs at least one tree, got 0")
    if titles is None:
        parts = [[view.clean(t.task_id, 40), f"sample {t.sample}", view.count_text(t, set(t.nodes))] for t in trees]
        ends = ["" if t.root.success is None else f" · s̃ {t.root.success:.2g}" for t in trees]
        return [" · ".join(part) + end for part, end in zip(parts, ends, strict=True)]
    if len(titles) != len(trees):
        raise UserError(f"a player got {len(trees)} trees and {len(titles)} titles: give one title for each tree")
    return list(titles)


def _pane(name: str, trees: Sequence[Tree], titles: Sequence[str] | None, color: view.ColorBy) -> str:
    options = "".join(f"<option>{escape(title)}</option>" for title in episode_titles(trees, titles))
    buttons = "".join(f'<button data-do="{do}" title="{hint}">{sign}</button>' for do, sign, hint in (
        ("start", "|◀", "first step (Home)"), ("back", "◀", "back (←)"), ("play", "play", "play (space)"),
        ("next", "▶", "next (→)"), ("end", "▶|", "last step (End)"),
    ))  # fmt: skip
    episodes = "".join(
        f'<div class="episode" hidden>{tree_html(tree, color)}'
        f'<div class="text">{"".join(map(node_html, tree))}</div></div>'
        for tree in trees
    )
    return (
        f'<section class="pane"><h2>{name}</h2><div class="bar"><select>{options}</select>{buttons}'
        f'<input type="range" min="0" value="0"><output></output></div>{episodes}</section>'
    )


def _episode_data(tree: Tree) -> dict[str, list[dict[str, object]]]:
    short = "s" if view.clock(tree).unit == "seconds" else "tokens"
    return {
        "steps": [
            {
                "node": s.node,
                "turn": s.turn,
                "time": f"{view.amount_text(s.time)} {short}",
            }
            for s in episode_steps(tree)
        ]
    }


def asset(name: str) -> str:
    """The text of a file that ships in `lib/assets`."""
    return (files("lib") / "assets" / name).read_text(encoding="utf8")


def save_player(
    path: str | Path, trees: Sequence[Tree], titles: Sequence[str] | None = None, heading: str = "Episodes",
    *, after: Sequence[Tree] | None = None, color: view.ColorBy = "reward",
) -> Path:  # fmt: skip
    """Write `html_player` to a file and return its path.

    Raises:
        UserError: the folder does not exist; whatever `html_player` raises.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"cannot save a player to '{path}': the folder '{path.parent}' does not exist; make it first")
    path.write_text(html_player(trees, titles, heading, after=after, color=color), encoding="utf8")
    return path


def embed_player(
    trees: Sequence[Tree], titles: Sequence[str] | None = None, heading: str = "Episodes",
    *, after: Sequence[Tree] | None = None, color: view.ColorBy = "reward", height: int = 620,
) -> HTML:  # fmt: skip
    """The player as a notebook output that still works in exported HTML: a frame apart from the page around it.

    Args:
        height: of the frame in pixels.
    """
    from IPython.display import HTML

    page = html.escape(html_player(trees, titles, heading, after=after, color=color))
    style = f"width:100%;height:{height}px;border:1px solid #dedede;border-radius:8px"
    title = escape(heading)
    return HTML(f'<div><iframe sandbox="allow-scripts" title="{title}" style="{style}" srcdoc="{page}"></iframe></div>')
