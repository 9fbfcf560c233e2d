// Panels of numbers: curves, matrices, bars and texts in pieces.

document.getElementById("about").textContent = data.about;

const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

function ticksBetween(low, high) {
  const extent = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(extent / 4));
  for (const factor of [5, 2.5, 2]) if (extent / (step * factor) >= 3) { step *= factor; break; }
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Number(tick.toPrecision(10)));
  return ticks;
}

function decadesBetween(low, high) {
  const ticks = [];
  for (let decade = 10 ** Math.floor(Math.log10(low)); decade <= high; decade *= 10)
    for (const factor of [1, 2, 5]) if (decade * factor >= low && decade * factor <= high) ticks.push(decade * factor);
  return ticks;
}

// Without spreading many thousands of numbers into arguments.
const rangeOf = (numbers) => numbers.reduce(([low, high], number) => [Math.min(low, number), Math.max(high, number)], [Infinity, -Infinity]);

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [640, 320, 84, 26, 12, 44];
const stroke = (i) => "var(--c" + (i % 8) + ")";

function frameOf(panel, xs, ys) {
  const [x0, x1] = rangeOf(xs);
  let [y0, y1] = rangeOf(ys);
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) / 2, y1 + (Math.abs(y1) || 1) / 2];
  const scale = panel.logarithmic ? Math.log : (value) => value;
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((scale(y1) - scale(value)) / (scale(y1) - scale(y0))) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, class: "chart", role: "img", tabindex: "0", "aria-label": panel.title + ": " + panel.y_label + " over " + panel.x_label + "; the table below has the numbers." });
  for (const tick of panel.logarithmic ? decadesBetween(y0, y1) : ticksBetween(y0, y1))
    svg.append(draw("path", { class: "axis", d: "M" + LEFT + " " + y(tick) + "H" + (WIDTH - RIGHT) }),
      draw("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end", "font-size": 12 }, short(tick)));
  for (const tick of ticksBetween(x0, x1))
    svg.append(draw("path", { class: "axis", d: "M" + x(tick) + " " + (HEIGHT - BOTTOM) + "v5" }),
      draw("text", { x: x(tick), y: HEIGHT - BOTTOM + 19, "text-anchor": "middle", "font-size": 12 }, short(tick)));
  svg.append(draw("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle", "font-size": 12, class: "faint" }, panel.x_label),
    draw("text", { transform: "translate(13 " + (TOP + HEIGHT - BOTTOM) / 2 + ") rotate(-90)", "text-anchor": "middle", "font-size": 12, class: "faint" }, panel.y_label));
  return { svg, x, y, x0, x1 };
}

function linesPanel(panel) {
  const series = panel.series.map((own) => ({ ...own, points: own.x.map((at, i) => [at, own.y[i]]).filter(([, value]) => value !== null) }));
  const all = series.flatMap((own) => own.points);
  if (!all.length) return [make("p", {}, "Nothing was measured.")];
  const { svg, x, y, x0, x1 } = frameOf(panel, all.map(([at]) => at), all.map(([, value]) => value));
  series.forEach((own) => {
    if (!own.points.length) return;
    svg.append(draw("path", { d: "M" + own.points.map(([at, value]) => x(at).toFixed(1) + " " + y(value).toFixed(1)).join("L"), fill: "none", stroke: stroke(own.colour),
      "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": own.dashed ? "5 4" : null, class: "curve" }));
    if (own.points.length < 60 && !own.dashed) for (const [at, value] of own.points) svg.append(draw("circle", { cx: x(at), cy: y(value), r: 2.5, fill: stroke(own.colour) }));
  });
  const cursor = draw("path", { class: "axis", d: "", "stroke-width": 1.5 });
  svg.append(cursor);
  const readout = make("p", { class: "readout" });
  const positions = [...new Set(all.map(([at]) => at))].sort((a, b) => a - b);
  const nearest = (points, at) => points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
  let current = null;
  const show = (at, aloud) => {
    current = positions.indexOf(at);
    cursor.setAttribute("d", "M" + x(at) + " " + TOP + "V" + (HEIGHT - BOTTOM));
    readout.textContent = panel.x_label + " " + short(at) + ": " + series.filter((own) => own.points.length).map((own) => {
      const [where, value] = nearest(own.points, at);
      return own.name + " " + short(value) + (where === at ? "" : " (at " + short(where) + ")");
    }).join("; ");
    if (aloud) say(readout.textContent);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = x0 + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
    show(nearest(positions.map((position) => [position]), at)[0]);
  });
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const to = current === null ? 0 : Math.max(0, Math.min(positions.length - 1, current + steps[event.key]));
    show(positions[to], true);
  });
  const legend = make("ul", { class: "legend" }, ...series.map((own) => make("li", {}, draw("svg", { width: 30, height: 10, "aria-hidden": "true" },
    draw("path", { d: "M0 5h30", stroke: stroke(own.colour), "stroke-width": 3, "stroke-dasharray": own.dashed ? "5 4" : null })), own.name)));
  return [series.length > 1 ? legend : null, svg, readout, tableOf(panel, series, positions)];
}

// Built when it is opened: curves have thousands of points.
function tableOf(panel, series, positions) {
  const table = make("details", { ontoggle: () => {
    if (!table.open || table.children.length > 1) return;
    const maps = series.map((own) => new Map(own.points));
    const body = make("tbody", {}, ...positions.map((at) => make("tr", {}, make("th", { scope: "row" }, short(at)),
      ...maps.map((map) => make("td", { class: "number" }, map.has(at) ? short(map.get(at)) : "")))));
    const head = make("tr", {}, ...[panel.x_label, ...series.map((own) => own.name)].map((text) => make("th", { scope: "col" }, text)));
    table.append(make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body)));
  } }, make("summary", {}, "The numbers as a table"));
  return table;
}

function heatmapPanel(panel) {
  const { shape: [height, width], largest, steps } = panel.values;
  const bytes = Uint8Array.from(atob(steps), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const valueAt = (i, j) => (view.getInt16(2 * (i * width + j), true) / 32767) * largest;
  const canvas = make("canvas", { class: "heatmap", role: "img", width, height,
    "aria-label": panel.title + ": " + height + " rows (" + panel.y_label + ") and " + width + " columns (" + panel.x_label + "), values up to " + short(largest) });
  let signed = false;
  canvas.style.aspectRatio = String(Math.max(0.8, Math.min(1.8, width / height)));
  const paint = () => {
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const [above, below] = [accent(), accent("--second")];
    for (let i = 0; i < height; i++) for (let j = 0; j < width; j++) {
      const value = valueAt(i, j);
      const at = 4 * (i * width + j);
      signed ||= value < 0;
      image.data.set(value < 0 ? below : above, at);
      image.data[at + 3] = (255 * Math.abs(value)) / largest;
    }
    context.putImageData(image, 0, 0);
  };
  paint();
  onTheme(paint);
  const readout = make("p", { class: "readout" }, panel.y_label + " ↓, " + panel.x_label + " →; largest size " + short(largest) + (signed ? "; below 0 in the second colour." : "."));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const j = Math.min(width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * width)));
    const i = Math.min(height - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * height)));
    readout.textContent = panel.y_label + " " + i + ", " + panel.x_label + " " + j + ": " + short(valueAt(i, j));
  });
  return [canvas, readout];
}

function barsPanel(panel) {
  const largest = Math.max(...panel.values, 1e-12);
  const body = panel.labels.map((label, i) => {
    const bar = make("div", { class: "bar", "aria-hidden": "true" });
    bar.style.width = (100 * panel.values[i]) / largest + "%";
    return make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "number" }, short(panel.values[i])), make("td", {}, bar));
  });
  return [make("div", { class: "scroll" }, make("table", { class: "bars" }, make("caption", { class: "note" }, panel.y_label), make("tbody", {}, ...body)))];
}

const piecesPanel = (panel) => [make("ol", { class: "pieces" }, ...panel.labels.map((label, i) =>
  make("li", { class: panel.words[i] % 2 ? "odd" : null }, label, make("small", {}, panel.ids[i]))))];

const kinds = { Lines: linesPanel, Heatmap: heatmapPanel, Bars: barsPanel, Pieces: piecesPanel };

// A page of a run that goes on reads its own file again, until it is told not to.
if (data.refresh) {
  const box = make("input", { type: "checkbox", id: "live", checked: sessionStorage.getItem("live") !== "no", onchange: () => sessionStorage.setItem("live", box.checked ? "yes" : "no") });
  main.append(make("p", { class: "controls" }, make("label", {}, box, "read the page again every " + data.refresh + " seconds while the run goes on")));
  setInterval(() => box.checked && location.reload(), 1000 * data.refresh);
}

const panels = make("div", { class: "panels" });
for (const panel of data.panels) panels.append(section(panel.title, panel.note, ...kinds[panel.kind](panel)));
main.append(panels);
