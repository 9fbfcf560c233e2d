// Word alignment, drawn from the decoder's attention to the source.

function buildAlignment() {
  const part = data.parts.find((candidate) => candidate.name === "cross");
  if (!part) return;
  const view = { layer: Math.max(0, part.layers - 2), head: null, least: 0.15, on: null };
  const frame = make("div", { class: "scroll" });
  const list = make("details", {}, make("summary", {}, "Alignment as a table"));
  const sources = data.source.wordLabels;
  const targets = data.target.wordLabels;
  const redraw = () => {
    const matrix = weightsOf(part, view.layer, view.head, true);
    frame.replaceChildren(drawAlignment(matrix, sources, targets, view, redraw));
    list.replaceChildren(list.firstElementChild, alignmentTable(matrix, sources, targets, view.least));
  };
  const numbers = (count) => Array.from({ length: count }, (_, i) => [i, i + 1]);
  const [layer] = choice("Layer", numbers(part.layers), view.layer, (value) => { view.layer = Number(value); redraw(); });
  const [head] = choice("Head", [["mean", "mean"], ...numbers(part.heads)], "mean", (value) => { view.head = value === "mean" ? null : Number(value); redraw(); });
  const shown = make("output", {}, percent(view.least));
  const least = make("input", { type: "range", min: 0, max: 60, step: 5, value: 15, id: "least", oninput: () => {
    view.least = Number(least.value) / 100;
    shown.textContent = percent(view.least);
    redraw();
  } });
  section("Word alignment", "A line joins a word of the translation with each source word that it looked at while it was written. Tokens are merged to words. "
    + "Often the last layer but one aligns best (Garg et al., 2019). Point at a word to see its lines alone.",
    make("div", { class: "controls" }, layer, head, make("label", {}, "lines from", least, shown)), frame, list);
  redraw();
  onTheme(redraw);
}

function placeWords(words) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = "15px system-ui, sans-serif";
  let x = 8;
  const places = words.map((word) => {
    const width = context.measureText(word).width + 4;
    const middle = x + width / 2;
    x += width + 12;
    return middle;
  });
  return [places, x];
}

function drawAlignment(matrix, sources, targets, view, redraw) {
  const [above, widthAbove] = placeWords(sources);
  const [below, widthBelow] = placeWords(targets);
  const width = Math.max(widthAbove, widthBelow);
  // The shorter line stands in the middle of the longer.
  const shiftAbove = (width - widthAbove) / 2;
  const shiftBelow = (width - widthBelow) / 2;
  const svg = draw("svg", { width, height: 170, viewBox: "0 0 " + width + " 170", role: "img", id: "alignment",
    "aria-label": "Lines between the words of source and translation; the table below has them as text." });
  const colour = accent().join(",");
  for (let i = 0; i < matrix.rows; i++)
    for (let j = 0; j < matrix.columns; j++) {
      const weight = matrix.values[i * matrix.columns + j];
      if (weight < view.least || weight <= 0) continue;
      const held = view.on === null || (view.on[0] === "target" ? view.on[1] === i : view.on[1] === j);
      const x1 = above[j] + shiftAbove;
      const x2 = below[i] + shiftBelow;
      svg.append(draw("path", { d: "M" + x1 + " 32C" + x1 + " 85 " + x2 + " 85 " + x2 + " 138", fill: "none", class: "link", "data-source": j, "data-target": i,
        stroke: "rgba(" + colour + "," + (held ? Math.min(1, 0.25 + weight) : 0.06) + ")", "stroke-width": 1 + 5 * weight },
        draw("title", {}, targets[i] + " → " + sources[j] + " " + percent(weight))));
    }
  const word = (text, x, y, side, index) => svg.append(draw("g", {
    class: "word" + (view.on && view.on[0] === side && view.on[1] === index ? " on" : ""),
    onpointerenter: () => hold(side, index), onpointerleave: () => hold(null),
  }, draw("text", { x, y, "text-anchor": "middle", "font-size": 15 }, text)));
  const hold = (side, index) => {
    const next = side === null ? null : [side, index];
    if (String(next) === String(view.on)) return;
    view.on = next;
    for (const link of svg.querySelectorAll(".link")) {
      const held = next === null || Number(link.dataset[next[0]]) === next[1];
      link.style.opacity = held ? "1" : "0.1";
    }
  };
  sources.forEach((text, j) => word(text, above[j] + shiftAbove, 22, "source", j));
  targets.forEach((text, i) => word(text, below[i] + shiftBelow, 158, "target", i));
  return svg;
}

function alignmentTable(matrix, sources, targets, least) {
  const body = make("tbody");
  targets.forEach((text, i) => {
    const row = Array.from(matrix.values.subarray(i * matrix.columns, (i + 1) * matrix.columns), (weight, j) => [j, weight]);
    const best = row.filter(([, weight]) => weight >= least && weight > 0).sort((a, b) => b[1] - a[1]);
    body.append(make("tr", {}, make("th", { scope: "row" }, text), make("td", {}, best.map(([j, weight]) => sources[j] + " " + percent(weight)).join(", ") || "–")));
  });
  const head = make("tr", {}, make("th", { scope: "col" }, "translation"), make("th", { scope: "col" }, "source"));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body));
}

buildAlignment();
