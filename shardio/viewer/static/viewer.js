// Keys, and a little comfort. The pages are whole without it.
"use strict";

const find = (what) => document.querySelector(what);
const help = find("dialog.help");

// Very small images are shown by their pixels, not blurred.
function sharpen(image) {
  if (image.naturalWidth && Math.max(image.naturalWidth, image.naturalHeight) <= 64) image.classList.add("small");
}
document.addEventListener("load", (event) => {
  if (event.target instanceof HTMLImageElement) sharpen(event.target);
}, true);
document.querySelectorAll("img").forEach(sharpen);

// A choice in the form is a wish to see it; what is typed waits for Enter.
find("form.query")?.addEventListener("change", (event) => {
  if (event.target.matches("select, [type=radio], [type=checkbox]")) event.currentTarget.requestSubmit();
});

// What is switched on or off is in the address, so that a shared link shows the same.
find(".switches")?.addEventListener("change", ({ target: { name, checked, dataset } }) => {
  const value = checked ? "1" : "0";
  const fields = location.search.slice(1).split("&").filter((one) => one && !one.startsWith(`${name}=`));
  const form = find(".crops-row form");
  form?.querySelector(`[name=${name}]`)?.remove();
  if (value !== dataset.usual) {
    fields.push(`${name}=${value}`);
    form?.insertAdjacentHTML("beforeend", `<input type="hidden" name="${name}" value="${value}">`);
  }
  history.replaceState(null, "", location.pathname + (fields.length ? "?" + fields.join("&") : ""));
});

// On a phone, records come first.
if (matchMedia("(max-width: 720px)").matches && !find("[role=alert]")) find("details.filters")?.removeAttribute("open");

// The record that one comes back from has the focus.
if (/^#r\d+$/.test(location.hash)) find(`${location.hash} > a`)?.focus();

const cards = () => [...document.querySelectorAll(".grid > li > a")];

function columns(all) {
  const top = all[0].offsetTop;
  const next = all.findIndex((one) => one.offsetTop !== top);
  return next < 0 ? all.length : next;
}

function move(by) {
  const all = cards();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const to = at < 0 ? 0 : Math.min(all.length - 1, Math.max(0, at + by(all)));
  all[to].focus();
  all[to].scrollIntoView({ block: "nearest" });
}

const follow = (rel) => find(`link[rel=${rel}]`) && location.assign(find(`link[rel=${rel}]`).href);
const inGrid = () => find(".grid") !== null;
const step = (by) => () => (inGrid() ? move(() => by) : follow(by < 0 ? "prev" : "next"));
const row = (by) => () => inGrid() && move((all) => by * columns(all));

function focusOn(what) {
  find("details.filters")?.setAttribute("open", "");
  const input = find(what);
  if (input) {
    input.focus();
    input.select();
  } else {
    location.assign("/#search");
  }
}

const actions = {
  "/": () => focusOn("input[name=search]"),
  "g": () => focusOn("input[name=record]"),
  "?": () => help.showModal(),
  "ArrowLeft": step(-1),
  "ArrowRight": step(1),
  "k": step(-1),
  "j": step(1),
  "ArrowUp": row(-1),
  "ArrowDown": row(1),
  "n": () => follow("next"),
  "p": () => follow("prev"),
  "Escape": () => follow("up"),
};

const moving = new Set(["ArrowUp", "ArrowDown"]);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || help.open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    if (!event.target.matches("[type=checkbox]")) return;
  }
  const action = actions[event.key];
  if (!action || (moving.has(event.key) && !inGrid())) return;
  event.preventDefault();
  action();
});

const button = find("button.keys");
if (button) {
  button.hidden = false;
  button.addEventListener("click", () => help.showModal());
}
if (location.hash === "#search") focusOn("input[name=search]");
