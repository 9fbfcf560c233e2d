"use strict";
// What every page uses: its data, elements whose content is text and never markup, colours of the theme, percentages.

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const percent = (value) => (value >= 0.0995 ? (100 * value).toFixed(0) : (100 * value).toFixed(1)) + " %";
const quoted = (text) => "“" + text + "”";

function accent(name = "--accent") {
  return getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const onTheme = (callback) => dark.addEventListener("change", callback);

// One polite voice for screen readers; the mouse does not make it speak.
const voice = make("p", { class: "hidden", "aria-live": "polite", id: "voice" });
main.append(voice);
const say = (text) => { voice.textContent = text; };

function section(title, note, ...children) {
  const id = "s" + document.querySelectorAll("section").length;
  const node = make("section", { "aria-labelledby": id }, make("h2", { id }, title), note && make("p", { class: "note" }, note), ...children);
  main.append(node);
  return node;
}

function choice(label, options, value, onchange) {
  const select = make("select", { onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(make("option", { value: key, selected: String(key) === String(value) }, text));
  return [make("label", {}, label, select), select];
}

// Shade a matrix of probabilities into a canvas of one pixel each: opacity is the square root, as the legend says.
function shade(canvas, matrix) {
  canvas.width = Math.max(matrix.columns, 1);
  canvas.height = Math.max(matrix.rows, 1);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [red, green, blue] = accent();
  for (let i = 0; i < matrix.values.length; i++) {
    image.data[4 * i] = red;
    image.data[4 * i + 1] = green;
    image.data[4 * i + 2] = blue;
    image.data[4 * i + 3] = 255 * Math.sqrt(matrix.values[i]);
  }
  context.putImageData(image, 0, 0);
}

// Arrow keys move the one element of a group that Tab reaches.
function rove(elements, index) {
  elements.forEach((node, i) => node.setAttribute("tabindex", i === index ? "0" : "-1"));
}
