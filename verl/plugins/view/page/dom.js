// Elements without HTML strings: whatever a sample holds stays text.

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** Make an element. Properties that begin with "on" are listeners; null and false are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) element.append(child);
    else if (element.tagName === "OPTION") element.append(String(child).replaceAll(UNSEEN, codeOf));
    else element.append(...visible(String(child)));
  }
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

/** Replace what is inside an element; the focus goes to what took the place of the element that had it. */
export function fill(element, ...children) {
  const had = element.contains(document.activeElement) ? document.activeElement : null;
  element.replaceChildren();
  append(element, children);
  const next = had && had !== element ? successorOf(had, element) : null;
  next?.focus({ preventScroll: true });
  if (typeof had?.selectionStart === "number" && typeof next?.selectionStart === "number") next.setSelectionRange(had.selectionStart, had.selectionEnd);
  return element;
}

/** The element of the same name, or else the first of the same kind: the oldest step leaves a list first. */
function successorOf(had, element) {
  const alike = [...element.querySelectorAll(FOCUSABLE)].filter((one) => one.tagName === had.tagName && one.className === had.className);
  return alike.find((one) => nameOf(one) === nameOf(had)) || alike[0];
}

function nameOf(element) {
  const run = element.closest("[data-run]")?.dataset.run;
  return [run, element.getAttribute("name"), element.getAttribute("aria-label"), element.textContent].join("\n");
}

/** A text as nodes: characters that cannot be seen, or that turn the direction of text, become their codes. */
function visible(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(UNSEEN)) {
    nodes.push(text.slice(end, found.index));
    nodes.push(h("span", { class: "unseen", title: "a character that cannot be seen" }, codeOf(found[0])));
    end = found.index + found[0].length;
  }
  return [...nodes, text.slice(end)];
}

function codeOf(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A block of a sample's text. */
export function textBlock(text, name = "text") {
  return h("pre", { class: name, dir: "auto", tabindex: "0" }, text);
}

/** A number in few characters. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toPrecision(4).replace(/\.?0+$/, "");
}

/** How long ago a time (seconds since 1970) was. */
export function ago(time) {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

/** A field of a form with its label. */
export function field(label, control) {
  return h("label", { class: "field" }, h("span", {}, label), control);
}

/** A choice of values, each a text or [value, text]. */
export function select(name, values, chosen, onchange) {
  const options = values.map((one) => {
    const [value, text] = Array.isArray(one) ? one : [one, one];
    return h("option", { value, selected: String(value) === String(chosen) }, text);
  });
  return h("select", { name, onchange }, options);
}
