// The tree of the beam search, from left to right, and the translations that it found.

// A chain is a node and the best child of each; it gets the first line below its parent's on which its columns are free.
function placeChains(children, depth) {
  const line = new Array(depth.length).fill(0);
  const taken = [];
  const waiting = [[0, -1]];
  while (waiting.length) {
    const [start, above] = waiting.shift();
    const chain = [start];
    while (children[chain.at(-1)].length) chain.push(children[chain.at(-1)][0]);
    const [from, to] = [depth[start] - 1, depth[chain.at(-1)]];
    let at = above + 1;
    while ((taken[at] || []).some(([first, last]) => first <= to && from <= last)) at++;
    (taken[at] ||= []).push([from, to]);
    for (const node of chain) line[node] = at;
    // What branches off late stands close, so that few edges cross.
    for (const node of chain.reverse()) for (const child of children[node].slice(1)) waiting.push([child, at]);
  }
  return line;
}

function buildTree() {
  const tree = data.tree;
  if (!tree) return;
  const [LABEL, PARENT, LOG_PROB, TOTAL, ENDS] = [0, 1, 2, 3, 4];
  const nodes = tree.nodes;
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => node[PARENT] >= 0 && children[node[PARENT]].push(i));
  children.forEach((own) => own.sort((a, b) => nodes[b][TOTAL] - nodes[a][TOTAL]));
  const depth = [];
  nodes.forEach((node, i) => { depth[i] = node[PARENT] < 0 ? 0 : depth[node[PARENT]] + 1; });
  const line = placeChains(children, depth);
  const lines = Math.max(...line) + 1;
  const pathTo = (i) => (i < 0 ? [] : [...pathTo(nodes[i][PARENT]), i]);
  const best = new Set(tree.hypotheses.length ? pathTo(tree.hypotheses[0].node) : []);
  const alive = new Set(tree.hypotheses.flatMap((hypothesis) => pathTo(hypothesis.node)));
  const [WIDE, HIGH, STEP, GAP] = [84, 34, 108, 42];
  const x = (i) => 4 + depth[i] * STEP;
  const y = (i) => 4 + line[i] * GAP;
  const width = 8 + Math.max(...depth) * STEP + WIDE;
  const height = 8 + lines * GAP;
  const svg = draw("svg", { width, height, viewBox: "0 0 " + width + " " + height, role: "tree", "aria-label": "Tree of the beam search", id: "tree" });
  nodes.forEach((node, i) => {
    if (node[PARENT] < 0) return;
    const [x1, y1, x2, y2] = [x(node[PARENT]) + WIDE, y(node[PARENT]) + HIGH / 2, x(i), y(i) + HIGH / 2];
    svg.append(draw("path", { class: best.has(i) ? "edge best" : "edge", d: "M" + x1 + " " + y1 + "C" + (x1 + x2) / 2 + " " + y1 + " " + (x1 + x2) / 2 + " " + y2 + " " + x2 + " " + y2 }));
  });
  const readout = make("p", { class: "readout", id: "branch" }, "Point at a token, or move through the tree with Tab and the arrow keys, to read its beginning and its score.");
  const textOf = (i) => {
    const node = nodes[i];
    const found = tree.hypotheses.findIndex((hypothesis) => hypothesis.node === i);
    return quoted(pathTo(i).slice(1).map((step) => nodes[step][LABEL]).join("").replaceAll("·", " ").trim() || node[LABEL])
      + (node[PARENT] < 0 ? ": the start." : ": " + quoted(node[LABEL]) + " has probability " + percent(Math.exp(node[LOG_PROB])) + ", log-probability up to here " + node[TOTAL].toFixed(2) + ".")
      + (found >= 0 ? " Translation " + (found + 1) + ", score " + tree.hypotheses[found].score.toFixed(3) + "." : "");
  };
  const drawn = nodes.map((node, i) => {
    const short = node[LABEL].length > 10 ? node[LABEL].slice(0, 9) + "…" : node[LABEL];
    const kind = "node" + (best.has(i) ? " best" : "") + (node[ENDS] ? " found" : "") + (alive.has(i) ? "" : " dead");
    const group = draw("g", {
      class: kind, role: "treeitem", tabindex: i ? "-1" : "0", "aria-level": depth[i] + 1, "aria-label": textOf(i), "aria-expanded": children[i].length ? "true" : null,
      onpointerenter: () => { readout.textContent = textOf(i); }, onfocus: () => mark(i), onclick: () => mark(i),
    }, draw("rect", { x: x(i), y: y(i), width: WIDE, height: HIGH, rx: 5 }),
      draw("text", { x: x(i) + WIDE / 2, y: y(i) + 14, "text-anchor": "middle", "font-size": 12 }, short),
      draw("text", { x: x(i) + WIDE / 2, y: y(i) + 28, "text-anchor": "middle", "font-size": 10, class: "faint" }, node[PARENT] < 0 ? "start" : node[TOTAL].toFixed(2)));
    return group;
  });
  svg.append(...drawn);
  const mark = (i) => {
    drawn.forEach((group, at) => group.classList.toggle("on", at === i));
    rove(drawn, i);
    readout.textContent = textOf(i);
  };
  svg.addEventListener("keydown", (event) => {
    const at = drawn.indexOf(document.activeElement);
    if (at < 0) return;
    const siblings = nodes[at][PARENT] < 0 ? [0] : children[nodes[at][PARENT]];
    const to = {
      ArrowLeft: nodes[at][PARENT], ArrowRight: children[at][0], Home: 0,
      ArrowDown: siblings[siblings.indexOf(at) + 1], ArrowUp: siblings[siblings.indexOf(at) - 1],
    }[event.key];
    if (!event.key.startsWith("Arrow") && event.key !== "Home") return;
    event.preventDefault();
    if (to === undefined || to < 0) return;
    drawn[to].focus();
    drawn[to].scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  const rows = tree.hypotheses.map((hypothesis, i) => make("tr", {}, make("td", { class: "number" }, i + 1), make("td", {}, hypothesis.text + (hypothesis.finished ? "" : " …")),
    make("td", { class: "number" }, hypothesis.score.toFixed(3)), make("td", { class: "number" }, hypothesis.logProb.toFixed(3))));
  const head = make("tr", {}, ...["", "translation", "score", "log-probability"].map((text) => make("th", { scope: "col" }, text)));
  section("Beam search", "Every token that a hypothesis went on with, with the sum of log-probabilities up to it. The best translation is filled, ends of translations are framed, "
    + "and branches that led to none of them are faint." + (data.targetIsGiven ? " The pictures above show the target that was given, not one of these." : ""),
    make("div", { class: "scroll" }, make("table", { id: "hypotheses" }, make("thead", {}, head), make("tbody", {}, ...rows))), readout, make("div", { class: "scroll" }, svg));
}

buildTree();
