// All heads as small multiples, and one of them large: who looks where.

// A byte is 255 times the square root of a probability.
const LEVELS = Float32Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);

for (const part of data.parts) {
  const text = atob(part.weights);
  part.bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) part.bytes[i] = text.charCodeAt(i);
  part.weights = null;
  part.size = [data[part.rows].tokens.length, data[part.columns].tokens.length];
}

const state = { part: null, layer: 0, head: null, words: false, colours: false, side: null, index: null, pinned: false };

function mergeWords(matrix, rowWords, columnWords) {
  const rows = rowWords[rowWords.length - 1] + 1;
  const columns = columnWords[columnWords.length - 1] + 1;
  const values = new Float32Array(rows * columns);
  const members = new Float32Array(rows);
  for (const word of rowWords) members[word] += 1;
  for (let i = 0; i < matrix.rows; i++)
    for (let j = 0; j < matrix.columns; j++)
      values[rowWords[i] * columns + columnWords[j]] += matrix.values[i * matrix.columns + j] / members[rowWords[i]];
  return { rows, columns, values };
}

// Weights of a head, or the mean of a layer's heads (head null), of tokens or of words.
function weightsOf(part, layer, head, words) {
  const [rows, columns] = part.size;
  const size = rows * columns;
  const values = new Float32Array(size);
  const first = head === null ? 0 : head;
  const last = head === null ? part.heads - 1 : head;
  for (let h = first; h <= last; h++) {
    const offset = (layer * part.heads + h) * size;
    for (let i = 0; i < size; i++) values[i] += LEVELS[part.bytes[offset + i]];
  }
  const count = last - first + 1;
  if (count > 1) for (let i = 0; i < size; i++) values[i] /= count;
  const matrix = { rows, columns, values };
  return words ? mergeWords(matrix, data[part.rows].words, data[part.columns].words) : matrix;
}

const labelsOf = (side) => (state.words ? data[side].wordLabels : data[side].tokens);
const headName = (head) => (head === null ? "mean of the heads" : "head " + (head + 1));

// Small multiples

const overview = { tiles: [], at: 0 };

function buildOverview() {
  const part = state.part;
  const perRow = part.heads + 1;
  overview.node.replaceChildren();
  overview.node.style.gridTemplateColumns = "max-content repeat(" + perRow + ", minmax(0, 64px))";
  overview.node.setAttribute("aria-rowcount", part.layers + 1);
  overview.node.setAttribute("aria-colcount", perRow + 1);
  overview.tiles = [];
  const header = make("div", { role: "row" }, make("span", { role: "columnheader" }, "layer"));
  for (let h = 0; h < part.heads; h++) header.append(make("span", { role: "columnheader" }, h + 1));
  header.append(make("span", { role: "columnheader" }, "mean"));
  overview.node.append(header);
  for (let layer = 0; layer < part.layers; layer++) {
    const row = make("div", { role: "row" }, make("span", { role: "rowheader" }, layer + 1));
    for (let h = 0; h < perRow; h++) {
      const head = h < part.heads ? h : null;
      const tile = make("div", {
        role: "gridcell", class: "tile", tabindex: "-1", "aria-label": "Layer " + (layer + 1) + ", " + headName(head),
        "data-layer": layer, "data-head": head === null ? "mean" : head,
        onclick: () => { chooseHead(layer, head); tile.focus(); },
      }, make("canvas"));
      tile.style.aspectRatio = String(Math.max(0.5, Math.min(2, part.size[1] / part.size[0])));
      overview.tiles.push({ tile, layer, head });
      row.append(tile);
    }
    overview.node.append(row);
  }
  drawOverview();
  markHead();
}

function drawOverview() {
  for (const { tile, layer, head } of overview.tiles) shade(tile.firstChild, weightsOf(state.part, layer, head, state.words));
}

function markHead() {
  overview.tiles.forEach(({ tile, layer, head }, i) => {
    const chosen = layer === state.layer && head === state.head;
    tile.setAttribute("aria-selected", chosen);
    if (chosen) overview.at = i;
  });
  rove(overview.tiles.map(({ tile }) => tile), overview.at);
}

function overviewKey(event) {
  const perRow = state.part.heads + 1;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perRow, ArrowUp: -perRow };
  const at = overview.tiles.findIndex(({ tile }) => tile === document.activeElement);
  if (at < 0) return;
  let to = at + (steps[event.key] || 0);
  if (event.key === "Home") to = at - (at % perRow);
  else if (event.key === "End") to = at - (at % perRow) + perRow - 1;
  else if (event.key === "Enter" || event.key === " ") {
    chooseHead(overview.tiles[at].layer, overview.tiles[at].head);
    say("Layer " + (state.layer + 1) + ", " + headName(state.head) + " is shown.");
    event.preventDefault();
    return;
  } else if (!(event.key in steps)) return;
  event.preventDefault();
  // Left and right stay in their layer.
  const sameRow = Math.floor(to / perRow) === Math.floor(at / perRow) || Math.abs(to - at) === perRow;
  if (to < 0 || to >= overview.tiles.length || !sameRow) return;
  rove(overview.tiles.map(({ tile }) => tile), to);
  overview.tiles[to].tile.focus();
}

// One head

const detail = { matrix: null, lists: {} };
const ROW = 22;

function buildDetail() {
  const part = state.part;
  detail.matrix = weightsOf(part, state.layer, state.head, state.words);
  detail.heads = state.colours && state.head === null
    ? Array.from({ length: part.heads }, (_, head) => weightsOf(part, state.layer, head, state.words)) : null;
  detail.legend.replaceChildren(...(detail.heads || []).map((_, head) => make("li", {}, draw("svg", { width: 20, height: 8, "aria-hidden": "true" },
    draw("path", { d: "M0 4h20", stroke: headColour(head), "stroke-width": 4 })), "head " + (head + 1))));
  detail.title.textContent = "Layer " + (state.layer + 1) + ", " + headName(state.head);
  const names = { source: "source", target: "writes", read: "has read" };
  detail.titles.replaceChildren(make("span", {}, names[part.rows]), make("span"), make("span", {}, names[part.columns]));
  for (const [side, name, what] of [["row", part.rows, "Who looks"], ["column", part.columns, "What is looked at"]]) {
    const list = detail.lists[side];
    list.setAttribute("aria-label", what + ": " + names[name]);
    list.replaceChildren(...labelsOf(name).map((label, index) => make("li", {
      role: "option", tabindex: index === 0 ? "0" : "-1", "aria-selected": "false", "data-index": index, title: label,
    }, make("span", { class: "name" }, label), make("span", { class: "share", "aria-hidden": "true" }))));
  }
  if (state.index !== null && state.index >= detail.lists[state.side].children.length) release();
  buildMap();
  drawDetail();
}

function looksOf(side, index, { rows, columns, values } = detail.matrix) {
  const looks = [];
  if (side === "row") for (let j = 0; j < columns; j++) looks.push([j, values[index * columns + j]]);
  else for (let i = 0; i < rows; i++) looks.push([i, values[i * columns + index]]);
  return looks;
}

function sentenceOf(side, index) {
  const part = state.part;
  const [own, other] = side === "row" ? [part.rows, part.columns] : [part.columns, part.rows];
  const others = labelsOf(other);
  const best = looksOf(side, index).sort((a, b) => b[1] - a[1]).slice(0, 5).filter(([, weight]) => weight >= 0.005);
  const listed = best.map(([at, weight]) => quoted(others[at]) + " " + percent(weight)).join(", ");
  let verb = side === "row" ? " looks at " : " is looked at by ";
  let about = "";
  if (side === "row" && part.rows === "target" && !state.words)
    about = " (probability " + percent(data.probabilities[index]) + ")";
  if (side === "row" && part.rows === "target") verb = about + ", to be written, looks at ";
  return "Position " + (index + 1) + ", " + quoted(labelsOf(own)[index]) + verb + (listed || "nothing in particular") + ".";
}

function drawDetail() {
  const { side, index } = state;
  for (const [name, list] of Object.entries(detail.lists)) {
    const shares = index === null || side === name ? null : looksOf(side, index);
    [...list.children].forEach((item, i) => {
      const weight = shares ? shares[i][1] : 0;
      item.setAttribute("aria-selected", name === side && i === index);
      item.style.backgroundColor = shares ? "rgba(var(--accent), " + (0.5 * Math.sqrt(weight)).toFixed(3) + ")" : "";
      item.lastChild.textContent = shares && weight >= 0.005 ? percent(weight) : "";
    });
  }
  detail.readout.textContent = index === null
    ? "Point at a token, or move to one with Tab and the arrow keys, to see where it looks; a click or Enter holds it, Escape lets go."
    : sentenceOf(side, index);
  drawLines();
  drawCross();
  if (detail.table.open) fillTable();
}

const headColour = (head) => "var(--c" + (head % 8) + ")";

function drawLines() {
  const { rows, columns } = detail.matrix;
  const canvas = detail.canvas;
  const width = canvas.parentElement.clientWidth;
  const height = ROW * Math.max(rows, columns);
  const ratio = Math.min(devicePixelRatio || 1, 2);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  let shift = 0;
  const line = (i, j, weight, strength) => {
    if (weight < least) return;
    context.globalAlpha = Math.min(1, strength * weight);
    context.lineWidth = 1 + 3 * weight;
    const [y1, y2] = [(i + 0.5) * ROW + shift, (j + 0.5) * ROW + shift];
    context.beginPath();
    context.moveTo(2, y1);
    context.bezierCurveTo(width / 2, y1, width / 2, y2, width - 2, y2);
    context.stroke();
  };
  // Of many heads, what is weak is left out: nobody could see it.
  const least = detail.heads ? 0.05 : 0.01;
  (detail.heads || [detail.matrix]).forEach((matrix, head, all) => {
    // Heads that look at the same token lie side by side.
    shift = (head - (all.length - 1) / 2) * Math.min(4, (ROW - 6) / all.length);
    context.strokeStyle = detail.heads
      ? getComputedStyle(document.documentElement).getPropertyValue("--c" + (head % 8)) : "rgb(" + accent().join(",") + ")";
    if (state.index === null)
      for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) line(i, j, matrix.values[i * columns + j], 1);
    else
      for (const [at, weight] of looksOf(state.side, state.index, matrix))
        state.side === "row" ? line(state.index, at, weight, 1.5) : line(at, state.index, weight, 1.5);
  });
}

function buildMap() {
  const { rows, columns } = detail.matrix;
  const room = Math.max(220, detail.map.clientWidth - 130);
  const cell = Math.max(6, Math.min(26, Math.floor(room / columns)));
  const labels = cell >= 9;
  detail.cell = cell;
  shade(detail.image, detail.matrix);
  detail.image.style.width = columns * cell + "px";
  detail.image.style.height = rows * cell + "px";
  const label = (text, property) => {
    const span = make("span", {}, text);
    span.style[property] = cell + "px";
    if (property === "height") span.style.lineHeight = cell + "px";
    return span;
  };
  detail.columns.replaceChildren(...(labels ? labelsOf(state.part.columns).map((text) => label(text, "width")) : []));
  detail.rows.replaceChildren(...(labels ? labelsOf(state.part.rows).map((text) => label(text, "height")) : []));
  detail.image.setAttribute("aria-label", "Matrix of weights, " + rows + " rows that look at " + columns + " columns; the table below has the strongest.");
}

// The matrix again, with the row or column that is held in a frame.
function drawCross() {
  shade(detail.image, detail.matrix);
  [...detail.rows.children].forEach((span, i) => { span.style.fontWeight = state.side === "row" && state.index === i ? "700" : ""; });
  [...detail.columns.children].forEach((span, i) => { span.style.fontWeight = state.side === "column" && state.index === i ? "700" : ""; });
}

function fillTable() {
  const body = make("tbody");
  labelsOf(state.part.rows).forEach((label, i) => {
    const best = looksOf("row", i).sort((a, b) => b[1] - a[1]).slice(0, 3);
    body.append(make("tr", {}, make("th", { scope: "row" }, label),
      ...best.map(([at, weight]) => make("td", {}, labelsOf(state.part.columns)[at] + " " + percent(weight)))));
  });
  const head = make("tr", {}, ...["token", "looks most at", "then at", "then at"].map((text) => make("th", { scope: "col" }, text)));
  detail.table.replaceChildren(detail.table.firstElementChild, make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body)));
}

function look(side, index, { pin = false, aloud = false } = {}) {
  if (state.pinned && !pin && !aloud) return;
  if (pin) {
    const same = state.pinned && state.side === side && state.index === index;
    if (same) return release();
    state.pinned = true;
  }
  state.side = side;
  state.index = index;
  drawDetail();
  if (aloud) say(sentenceOf(side, index));
}

function release() {
  state.side = state.index = null;
  state.pinned = false;
  if (detail.matrix) drawDetail();
}

function listKey(event) {
  const list = event.currentTarget;
  const side = list.dataset.side;
  const items = [...list.children];
  const at = items.indexOf(document.activeElement);
  if (at < 0) return;
  const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 };
  if (event.key in moves) {
    const to = Math.max(0, Math.min(items.length - 1, moves[event.key]));
    rove(items, to);
    state.pinned = false;
    items[to].focus();
  } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    const other = detail.lists[side === "row" ? "column" : "row"];
    other.querySelector('[tabindex="0"]').focus();
  } else if (event.key === "Enter" || event.key === " ") look(side, at, { pin: true, aloud: true });
  else if (event.key === "Escape") release();
  else return;
  event.preventDefault();
}

// Choosing

function choosePart(name) {
  state.part = data.parts.find((part) => part.name === name);
  state.layer = Math.min(state.layer, state.part.layers - 1);
  if (state.head !== null) state.head = Math.min(state.head, state.part.heads - 1);
  release();
  fillChoices();
  buildOverview();
  buildDetail();
}

function chooseHead(layer, head) {
  state.layer = layer;
  state.head = head;
  controls.layer.value = layer;
  controls.head.value = head === null ? "mean" : head;
  markHead();
  buildDetail();
}

const controls = {};

function fillChoices() {
  const numbers = (count) => Array.from({ length: count }, (_, i) => make("option", { value: i }, i + 1));
  controls.layer.replaceChildren(...numbers(state.part.layers));
  controls.head.replaceChildren(make("option", { value: "mean" }, "mean"), ...numbers(state.part.heads));
  controls.layer.value = state.layer;
  controls.head.value = state.head === null ? "mean" : state.head;
}

function buildAttention() {
  const radios = data.parts.map((part) => make("label", {}, make("input", {
    type: "radio", name: "part", value: part.name, onchange: () => choosePart(part.name),
  }), part.title));
  const words = make("input", { type: "checkbox", id: "words", onchange: () => {
    state.words = words.checked;
    release();
    drawOverview();
    buildDetail();
  } });
  const colours = make("input", { type: "checkbox", id: "colours", onchange: () => {
    state.colours = colours.checked;
    if (colours.checked) chooseHead(state.layer, null);
    else buildDetail();
  } });
  const chosen = () => chooseHead(Number(controls.layer.value), controls.head.value === "mean" ? null : Number(controls.head.value));
  let layerLabel, headLabel;
  [layerLabel, controls.layer] = choice("Layer", [], "", chosen);
  [headLabel, controls.head] = choice("Head", [], "", chosen);
  controls.layer.id = "layer";
  controls.head.id = "head";
  overview.node = make("div", { class: "heads", role: "grid", "aria-label": "All layers and heads", onkeydown: overviewKey });
  section("All heads", "Each square is a head: a row for each position that looks, a column for each that is looked at. Choose one to see it below.",
    make("div", { class: "controls" }, make("fieldset", {}, make("legend", { class: "hidden" }, "Which attention"), ...radios), layerLabel, headLabel,
      make("label", {}, words, "merge tokens to words"),
      make("label", {}, colours, "all heads in colours"),
      make("span", { class: "faint" }, "0 % ", make("span", { class: "scale", "aria-hidden": "true" }), " 100 %, shade ∝ √weight")),
    overview.node);
  buildDetailNodes();
  state.part = data.parts[data.parts.length - 1];
  state.layer = Math.max(0, state.part.layers - 2);
  main.querySelector('input[name="part"][value="' + state.part.name + '"]').checked = true;
  choosePart(state.part.name);
}

function buildDetailNodes() {
  for (const side of ["row", "column"]) {
    const list = detail.lists[side] = make("ol", { role: "listbox", "data-side": side, onkeydown: listKey });
    const at = (event) => event.target.closest("li");
    list.addEventListener("pointerover", (event) => at(event) && event.pointerType === "mouse" && look(side, Number(at(event).dataset.index)));
    list.addEventListener("pointerleave", () => state.pinned || release());
    list.addEventListener("click", (event) => at(event) && look(side, Number(at(event).dataset.index), { pin: true }));
    list.addEventListener("focusin", (event) => at(event)?.matches(":focus-visible") && look(side, Number(at(event).dataset.index), { aloud: true }));
  }
  detail.canvas = make("canvas", { "aria-hidden": "true" });
  detail.titles = make("div", { class: "titles", "aria-hidden": "true" });
  detail.legend = make("ul", { class: "legend", id: "heads-legend" });
  detail.readout = make("p", { class: "readout", id: "readout" });
  detail.image = make("canvas", { role: "img", id: "matrix" });
  detail.columns = make("div", { class: "columns", "aria-hidden": "true" });
  detail.rows = make("div", { class: "rows", "aria-hidden": "true" });
  detail.map = make("div", { class: "map scroll" }, make("div", { class: "frame" }, detail.columns, detail.rows, detail.image));
  detail.table = make("details", { id: "strongest", ontoggle: () => detail.table.open && fillTable() }, make("summary", {}, "Strongest weights as a table"));
  const node = section("", null, detail.legend, detail.readout,
    make("div", { class: "views" },
      make("div", { class: "lines" }, detail.titles, make("div", { class: "pair" }, detail.lists.row, make("div", {}, detail.canvas), detail.lists.column)),
      detail.map),
    detail.table);
  detail.title = node.querySelector("h2");
  const cellAt = (event) => {
    const box = detail.image.getBoundingClientRect();
    return [Math.floor((event.clientY - box.top) / detail.cell), Math.floor((event.clientX - box.left) / detail.cell)];
  };
  detail.image.addEventListener("pointermove", (event) => {
    const [i, j] = cellAt(event);
    const { rows, columns, values } = detail.matrix;
    if (i < 0 || j < 0 || i >= rows || j >= columns) return;
    look("row", i);
    detail.readout.textContent = quoted(labelsOf(state.part.rows)[i]) + " looks at " + quoted(labelsOf(state.part.columns)[j]) + " with " + percent(values[i * columns + j]) + ".";
  });
  detail.image.addEventListener("pointerleave", () => state.pinned || release());
  detail.image.addEventListener("click", (event) => look("row", cellAt(event)[0], { pin: true }));
}

document.getElementById("about").textContent =
  data.model + ": " + data.parts.map((part) => part.layers + " layers × " + part.heads + " heads (" + part.name + ")").join(", ") + ".";
main.append(make("p", { class: "sentence", id: "source" }, data.sourceText));
if (data.target.tokens.length) main.append(make("p", { class: "sentence", id: "target" }, data.targetText));
if (data.parts.length) buildAttention();

let resizing;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => data.parts.length && (buildMap(), drawDetail()), 100);
});
onTheme(() => data.parts.length && (drawOverview(), drawDetail()));
