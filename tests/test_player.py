"""The player tells events in their order and shows untrusted text as text, whatever it contains."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import example_node, example_tree, segment

from lib import player
from lib.errors import UserError
from lib.tree import Node, Tree

HOSTILE = (
    "</script></pre></article><script>alert(1)</script><!-- <img src=x onerror=alert(1)> "
    "\x1b[31m \u202e \" ' &lt; \ud800"
)
ALLOWED = {
    "html", "head", "meta", "title", "style", "noscript", "script", "body", "h1", "h2", "div", "section", "article",
    "header", "select", "option", "button", "input", "output", "span", "details", "summary", "pre", "i", "b", "svg",
    "path", "g", "circle", "text",
}  # fmt: skip


class Page(HTMLParser):
    """What a browser would see: the tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_comment(self, data):
        self.tags.append(("comment", {}))

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        elif not self.inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def check(self) -> None:
        """No tag, attribute or address beyond those of our own markup."""
        assert {tag for tag, _ in self.tags} <= ALLOWED
        for _, attributes in self.tags:
            assert not {a for a in attributes if a.startswith("on")} | ({"href", "src", "action"} & set(attributes))


def hostile_tree() -> Tree:
    tree = example_tree(1, 1)
    tree.task_id = HOSTILE
    for n in tree:
        n.task = HOSTILE
        n.info["reason"] = HOSTILE
        n.info["reward_terms"] = {HOSTILE: 1.0}
        for s in n.segments:
            s.text = HOSTILE + s.text.replace("</python>", "# " + HOSTILE + "</python>") + HOSTILE
    return tree


# -- order of events --------------------------------------------------------------------------------------------------


def test_steps_follow_recorded_time_then_launch_order():
    tree = Tree("t", "t")
    tree.add(example_node("0", "root", [("a", "x"), ("b", "")], ended=9.0, info={"times": [1.0, 8.0]}))
    tree.add(example_node("0.0", "kid", [("c", "x"), ("d", "")], started=1.5, ended=6.0, info={"times": [3.0, 5.0]}))
    tree.add(example_node("0.1", "kid", [("e", "")], started=1.5, ended=4.0, info={"times": [3.0]}))
    tree.add(Node("0.2", "never acted", started=2.0, ended=2.0, status="aborted"))
    told = [(s.node, s.turn, s.time) for s in player.episode_steps(tree)]
    assert told == [
        ("0", 0, 1.0), ("0.2", None, 2.0), ("0.0", 0, 3.0), ("0.1", 0, 3.0), ("0.0", 1, 5.0), ("0", 1, 8.0),
    ]  # fmt: skip


def test_steps_without_time_stamps_put_children_after_the_action_that_launched_them():
    tree = Tree("t", "t")
    tree.add(example_node("0", "root", [("aaa", "x"), ("b", "")]))
    tree.add(example_node("0.0", "kid", [("cc", "")]))
    assert [(s.node, s.turn, s.time) for s in player.episode_steps(tree)] == [("0", 0, 3), ("0.0", 0, 5), ("0", 1, 6)]


@pytest.mark.parametrize("gather", [True, False])
def test_steps_tell_every_action_once_and_each_node_in_its_own_order(gather: bool):
    tree = example_tree(2, 2, gather=gather)
    steps = player.episode_steps(tree)
    assert len(steps) == sum(n.turns for n in tree)
    for n in tree:
        assert [s.turn for s in steps if s.node == n.id] == list(range(n.turns))
    assert steps[-1].node == "0"


# -- one node ---------------------------------------------------------------------------------------------------------


def test_node_shows_prompt_thought_code_observation_status_and_reward_terms():
    node = example_tree(0, 0, skill=1.0).root
    node.info["reward_terms"] = {"success": 1.0, "delegation": 0.25}
    page = Page(player.node_html(node, turn=1))
    page.check()
    for words in ("finished", "s̃ 1", "R = 1 success + 0.25 delegation", "You are a crafting agent.", "I need a6_i2."):
        assert words in page.text
    assert 'craft({"a6_i2_part0": 1}, ("a6_i2", 1))' in page.text
    assert "crafted 1" in page.text
    assert "<thought>" not in page.text
    turns = [a["class"] for tag, a in page.tags if tag == "div" and "data-turn" in a]
    assert turns == ["turn", "turn current", "turn future"]


def test_tool_calls_in_json_and_plain_actions_are_shown_whole():
    for action in ('[{"name": "search", "arguments": {"q": "<b>"}}]', "no code & no tags"):
        page = Page(player.node_html(Node("0", "t", [segment(action, trainable=True)])))
        page.check()
        assert action in page.text


def test_text_that_was_not_kept_is_counted():
    node = example_node("0", "t", [("abc", "")])
    for s in node.segments:
        s.text = ""
    assert "(3 tokens; their text was not kept)" in player.node_html(node)


@given(st.text())
def test_escape_keeps_every_visible_character_and_no_markup(text: str):
    page = Page(f"<pre>{player.escape(text)}</pre>")
    assert [tag for tag, _ in page.tags] == ["pre"]
    shown = re.sub(r"⟨U\+[0-9A-F]{4}⟩", "", page.text)
    assert not player.INVISIBLE.search(page.text)
    assert shown == re.sub(r"⟨U\+[0-9A-F]{4}⟩", "", player.INVISIBLE.sub("", text.replace("\r\n", "\n")))
    player.escape(text + "\ud800").encode()  # can be written to a file


def test_invisible_characters_are_named():
    assert player.escape("\x1b[31m\u202e\ud800\r\nok\t") == "⟨U+001B⟩[31m⟨U+202E⟩⟨U+D800⟩\nok\t"


def test_long_texts_are_cut_with_a_note():
    assert player.escape("x" * 6001).endswith('<span class="cut"> … 1 more characters not shown</span>')
    node = Node("0", "t", [segment("<python>" + "y" * 7000 + "</python>", trainable=True)])
    assert "1,000 more characters not shown" in player.node_html(node)
    assert player.node_html(node).count("y") < 6100


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_svg_has_the_nodes_edges_and_states():
    tree = example_tree(1, 2)
    page = Page(player.tree_svg(tree, states={"0.1": "future"}))
    page.check()
    nodes = {a["data-id"]: a["class"] for tag, a in page.tags if tag == "g"}
    assert {k: v.split() for k, v in nodes.items()} == {"0": ["node"], "0.0": ["node"], "0.1": ["node", "future"]}
    assert [a["data-id"] for tag, a in page.tags if tag == "path"] == ["0.0", "0.1"]


# -- the document -----------------------------------------------------------------------------------------------------


def test_document_needs_nothing_from_outside():
    source = player.html_player([example_tree(), example_tree(1, 3)], ["one", "two"], "Episodes")
    page = Page(source)
    page.check()
    assert [a.get("type") for tag, a in page.tags if tag == "script"] == ["application/json", None]
    assert "http://" not in source and "https://" not in source and "@import" not in source and "url(" not in source
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_document_holds_every_episode_and_its_steps():
    trees = [example_tree(), example_tree(1, 3, timed=False)]
    page = Page(player.html_player(trees, ["one", "two"]))
    data = json.loads(page.scripts[0])
    assert [len(e["steps"]) for e in data[0]] == [len(player.episode_steps(t)) for t in trees]
    assert data[0][0]["steps"][0] == {"node": "0", "turn": 0, "time": "0.5 s"}
    assert data[0][1]["steps"][0]["time"].endswith(" tokens")
    articles = [a["data-id"] for tag, a in page.tags if tag == "article"]
    assert articles == [*trees[0].nodes, *trees[1].nodes]
    assert "one" in page.words and "two" in page.words


def test_before_and_after_stand_side_by_side():
    page = Page(player.html_player([example_tree(1, 1)], ["task"], after=[example_tree(1, 2)]))
    assert sum(a.get("class") == "pane" for _, a in page.tags) == 2
    assert any(a.get("class") == "panes two" for _, a in page.tags)
    assert "before" in page.words and "after" in page.words
    assert len(json.loads(page.scripts[0])) == 2


def test_hostile_text_cannot_leave_its_place():
    plain = Page(player.html_player([example_tree(1, 1)], ["t"], "h", after=[example_tree(1, 1)]))
    page = Page(player.html_player([hostile_tree()], [HOSTILE], HOSTILE, after=[hostile_tree()]))
    page.check()
    assert page.scripts[1] == plain.scripts[1]
    assert len(page.scripts) == 2
    assert "<img src=x onerror=alert(1)>" in page.text  # there to read, as text
    assert "\x1b" not in page.text and "\u202e" not in page.text


@given(st.text())
def test_script_json_cannot_end_its_element(text: str):
    raw = player.script_json({"x": text + "</script><!--"})
    assert not set(raw) & set("<>&\u2028\u2029")
    assert json.loads(raw) == {"x": text + "</script><!--"}


def test_titles_default_to_task_sample_and_success():
    tree = example_tree(1, 2, skill=1.0)
    assert player.episode_titles([tree], None) == ["val.17 · sample 0 · 3 nodes · s̃ 1"]
    with pytest.raises(UserError, match="1 trees and 2 titles"):
        player.html_player([tree], ["a", "b"])
    with pytest.raises(UserError, match="at least one tree"):
        player.html_player([])


def test_save_player_writes_the_document(tmp_path):
    tree = hostile_tree()
    path = player.save_player(tmp_path / "player.html", [tree], heading="Episodes")
    assert path.read_text(encoding="utf8") == player.html_player([tree], heading="Episodes")
    with pytest.raises(UserError, match="does not exist"):
        player.save_player(tmp_path / "nowhere" / "player.html", [tree])


@pytest.mark.filterwarnings("error")
def test_embedded_player_is_the_document_in_a_sandboxed_frame():
    trees = [hostile_tree()]
    data = player.embed_player(trees, heading=HOSTILE).data
    frame = re.fullmatch(
        r'<div><iframe sandbox="allow-scripts" title="[^"]*" style="[^"]*" srcdoc="([^"]*)"></iframe></div>', data
    )
    assert frame
    assert html.unescape(frame[1]) == player.html_player(trees, heading=HOSTILE)
