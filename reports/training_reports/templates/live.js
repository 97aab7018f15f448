{% include "page.js" %}
{% include "elements.js" %}
// Asks for the page again, and puts what has changed in the place of what was there. The rest of the page stays as it
// is, with its zooms and scrolls.
const PAUSE_MS = 2000;
const told = document.querySelector(".live");
const sent = new WeakMap(); // the HTML of a block as the server has sent it, before scripts changed it
let tag = "";
let changed = Date.now();

const blocksOf = (parent) => [...parent.children].filter((one) => !one.matches("script, .live"));
const holdsBlocks = (block) => block.matches(".cards, .panels");
const nameOf = (block) =>
  holdsBlocks(block) ? block.className : `${block.tagName} ${block.querySelector("h2")?.textContent}`;

function remember(block) {
  sent.set(block, block.outerHTML);
  if (holdsBlocks(block)) blocksOf(block).forEach(remember);
}

function begin(block) {
  enliven(block);
  within(block, ".plot").forEach(draw);
}

// Whether a reader has marked text in a block, or has opened its list of choices.
function isInUse(block) {
  const marked = getSelection();
  return (!marked.isCollapsed && marked.containsNode(block, true)) || block.querySelector("select:focus") !== null;
}

// Brings the blocks of a part of the page to those of the new page; returns whether nothing was left for later.
function refresh(parent, next) {
  const known = blocksOf(parent);
  let place = parent.firstElementChild;
  let isWhole = true;
  for (const block of blocksOf(next)) {
    const at = known.findIndex((one) => nameOf(one) === nameOf(block));
    const old = at < 0 ? null : known.splice(at, 1)[0];
    let shown = old;
    if (old === null) {
      remember(block);
      shown = block;
      parent.insertBefore(block, place);
      begin(block);
    } else if (sent.get(old) !== block.outerHTML) {
      if (holdsBlocks(old)) isWhole = refresh(old, block) && isWhole;
      else if (isInUse(old)) isWhole = false;
      else shown = replace(old, block);
    }
    if (place === old && old !== null) place = shown;
    if (place === shown) place = shown.nextElementSibling;
    else if (old !== null) parent.insertBefore(shown, place);
  }
  for (const gone of known) {
    within(gone, ".plot").forEach(Plotly.purge);
    gone.remove();
  }
  return isWhole;
}

function replace(old, block) {
  remember(block);
  const plot = old.querySelector(".plot");
  const next = block.querySelector(".plot");
  if (plot && next) {
    sent.set(old, sent.get(block));
    for (const name of ["aria-label", "style"]) {
      if (next.hasAttribute(name)) plot.setAttribute(name, next.getAttribute(name));
    }
    for (const part of ['script[type="application/json"]', "figcaption"]) {
      old.querySelector(part).replaceWith(block.querySelector(part));
    }
    draw(plot);
    return old;
  }
  const choices = within(old, ".elements").map(choicesOf);
  const scrolls = within(old, ".log, .table").map((one) => [one.scrollLeft, one.scrollTop]);
  const opened = new Map(within(old, "details").map((one) => [one.querySelector("summary").firstChild.textContent, one.open]));
  old.replaceWith(block);
  begin(block);
  within(block, ".elements").forEach((section, place) => choose(section, choices[place]));
  for (const one of within(block, "details")) {
    one.open = opened.get(one.querySelector("summary").firstChild.textContent) ?? one.open;
  }
  within(block, ".log, .table").forEach((one, place) => one.scrollTo(...(scrolls[place] ?? [0, 0])));
  return block;
}

// What a reader has chosen in the table of a sweep's elements.
function choicesOf(section) {
  const search = section.querySelector("input");
  const sorted = section.querySelector("th[aria-sort]");
  return {
    search: search.value,
    caret: search === document.activeElement ? search.selectionStart : null,
    state: section.querySelector("select").value,
    column: sorted?.textContent,
    order: sorted?.getAttribute("aria-sort"),
  };
}

function choose(section, choices) {
  const search = section.querySelector("input");
  const state = section.querySelector("select");
  search.value = choices.search;
  state.value = choices.state;
  if (state.selectedIndex < 0) state.value = ""; // no element is in that state any more
  state.dispatchEvent(new Event("change"));
  if (choices.caret !== null) {
    search.focus({ preventScroll: true });
    search.setSelectionRange(choices.caret, choices.caret);
  }
  const header = [...section.querySelectorAll("thead th")].find((one) => one.textContent === choices.column);
  for (let clicks = 0; header && clicks < 2 && header.getAttribute("aria-sort") !== choices.order; clicks++) {
    header.querySelector("button").click();
  }
}

// Returns what is wrong; empty if nothing is.
async function look() {
  const known = tag ? { "If-None-Match": tag } : {};
  const answer = await fetch(location.pathname, { cache: "no-store", headers: known }).catch(() => null);
  if (answer === null) return "The server does not answer. Start training-infra watch again, and open its address.";
  if (answer.status === 304) return "";
  const text = await answer.text();
  if (!answer.ok) return text;
  const page = new DOMParser().parseFromString(text, "text/html");
  document.title = page.title;
  changed = Date.now();
  tag = refresh(document.body, page.body) ? answer.headers.get("ETag") : "";
  return "";
}

function say(problem) {
  const seconds = Math.round((Date.now() - changed) / 1000);
  told.textContent = problem || `Live. Newest change: ${seconds < 4 ? "now" : `${seconds} s ago`}.`;
  told.classList.toggle("bad", problem !== "");
}

async function keepLooking() {
  if (!document.hidden) await look().then(say, (error) => say(`The page cannot be refreshed (${error}); reload it.`));
  setTimeout(keepLooking, PAUSE_MS);
}

blocksOf(document.body).forEach(remember);
try {
  begin(document.body);
} catch (error) {
  explain(error);
}
keepLooking();
