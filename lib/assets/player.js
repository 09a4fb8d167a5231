"use strict";
// One player per pane: shows one episode, at one step, on one tree and one transcript.
// All markup is made and escaped beforehand; this script only switches classes and visibility.
const data = JSON.parse(document.getElementById("data").textContent);

class Player {
  constructor(pane, episodes) {
    this.pane = pane;
    this.episodes = episodes;
    this.timer = null;
    this.select = pane.querySelector("select");
    this.slider = pane.querySelector("input");
    this.output = pane.querySelector("output");
    this.select.onchange = () => { this.stop(); this.open(this.select.selectedIndex); };
    this.slider.oninput = () => { this.stop(); this.go(+this.slider.value); };
    for (const button of pane.querySelectorAll("button")) {
      button.onclick = () => this[button.dataset.do]();
    }
    pane.querySelectorAll(".node").forEach(node => {
      node.onclick = () => { this.stop(); this.go(this.episode.steps.findIndex(s => s.node === node.dataset.id)); };
    });
    this.open(0);
  }

  open(index) {
    this.select.selectedIndex = index;
    this.episode = this.episodes[index];
    this.views = [...this.pane.querySelectorAll(".episode")];
    this.views.forEach((view, k) => { view.hidden = k !== index; });
    this.view = this.views[index];
    this.first = new Map();
    this.last = new Map();
    this.episode.steps.forEach((step, k) => {
      if (!this.first.has(step.node)) this.first.set(step.node, k);
      this.last.set(step.node, k);
    });
    this.slider.max = this.episode.steps.length - 1;
    this.go(0);
  }

  go(k) {
    const steps = this.episode.steps;
    this.k = Math.max(0, Math.min(k, steps.length - 1));
    const now = steps[this.k];
    this.slider.value = this.k;
    this.output.textContent = `step ${this.k + 1} of ${steps.length} · ${now.time}`;
    for (const part of this.view.querySelectorAll(".node, .edge")) {
      const id = part.dataset.id;
      part.classList.toggle("future", this.k < this.first.get(id));
      part.classList.toggle("live", this.k >= this.first.get(id) && this.k < this.last.get(id));
      part.classList.toggle("current", id === now.node);
      if (id === now.node && part.matches(".node")) this.reveal(this.view.querySelector(".scroll"), part);
    }
    for (const article of this.view.querySelectorAll("article")) {
      article.hidden = article.dataset.id !== now.node;
      if (article.hidden) continue;
      for (const turn of article.querySelectorAll(".turn")) {
        turn.classList.toggle("current", +turn.dataset.turn === now.turn);
        turn.classList.toggle("future", +turn.dataset.turn > now.turn);
        if (+turn.dataset.turn === now.turn) this.reveal(this.view.querySelector(".text"), now.turn ? turn : article);
      }
    }
  }

  // Scroll inside the box only: scrollIntoView would also move the page around an embedded player.
  reveal(box, part) {
    const outer = box.getBoundingClientRect(), inner = part.getBoundingClientRect();
    if (inner.left < outer.left || inner.right > outer.right) {
      box.scrollLeft += (inner.left + inner.right - outer.left - outer.right) / 2;
    }
    if (inner.top < outer.top || inner.height > outer.height) box.scrollTop += inner.top - outer.top - 8;
    else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
  }

  start() { this.stop(); this.go(0); }
  back() { this.stop(); this.go(this.k - 1); }
  next() { this.stop(); this.go(this.k + 1); }
  end() { this.stop(); this.go(this.episode.steps.length - 1); }
  play() {
    if (this.timer) return this.stop();
    if (this.k === this.episode.steps.length - 1) this.go(0);
    this.button("pause");
    this.timer = setInterval(() => {
      this.go(this.k + 1);
      if (this.k === this.episode.steps.length - 1) this.stop();
    }, 900);
  }
  stop() { clearInterval(this.timer); this.timer = null; this.button("play"); }
  button(text) { this.pane.querySelector("[data-do=play]").textContent = text; }
}

const players = [...document.querySelectorAll(".pane")].map((pane, k) => new Player(pane, data[k]));
const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "start", End: "end", " ": "play" };
document.addEventListener("keydown", event => {
  const action = keys[event.key];
  if (!action || event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target.matches("button, summary")) return;
  event.preventDefault();
  players.forEach(player => player[action]());
});
if (players.length > 1) {
  players.forEach(player => player.select.addEventListener("change", () => {
    const index = player.select.selectedIndex;
    players.filter(p => p !== player && index < p.episodes.length).forEach(p => p.open(index));
  }));
}
