// The live page: requests /facts once a second and shows the data.
// Titles, units and tables come with the data, so the page works for every program.
// Untrusted text is only set as textContent, never as markup. Elements are reused on updates, so
// that focus and selection stay.
"use strict";

const INTERVAL_SECONDS = 1;
const RATES_MAX = 180;
const SPANS = [  // Times that the chart can show. A step is a number of seconds.
  { title: "3 minutes", words: "three minutes", step: 1 },
  { title: "1 hour", words: "hour", step: 10 },
  { title: "1 day", words: "day", step: 300 },
];
const IDLE_ROWS_SHOWN_MAX = 3;
const ACTIVE_SECONDS = 60;
const TIMEOUT_SECONDS = 5;
const COLLAPSIBLE = new Set(["sessions", "clients", "links"]);  // Collapsed on small screens at first.
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);

const state = {
  next: 0,            // Number of the next second of rates to request.
  rates: new Map(),   // By series: rates of the last minutes, newest last; null if unknown.
  hidden: new Set(),  // Series that are not drawn.
  sorts: new Map(),   // By table: [column, is descending].
  before: new Map(),  // By table: rows of the previous snapshot and its time.
  span: SPANS[0],     // Time that the chart shows.
  history: null,      // Rates of a longer time; its step, and when it was requested.
  search: "",
  unfolded: new Set(),  // Tables whose idle rows are shown.
  activeAt: new Map(),  // By table and row: when a counter grew last.
  details: null,      // Class or connection that is shown: its kind and name.
  pointed: null,      // Chart cursor, in steps ago.
  updatedAt: 0,       // Time of the last update.
  isPaused: false,
  facts: null,
  letterClass: null,  // Class whose dead letters are shown.
};

// Figures ---------------------------------------------------------------------------------------

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDecimal = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

function formatShort(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size * 10 || (unit !== "k" && Math.abs(value) >= size)) {
      return oneDecimal.format(value / size) + " " + unit;
    }
  }
  return value !== 0 && Math.abs(value) < 10 ? oneDecimal.format(value) : grouped.format(value);
}

function formatBytes(value) {
  let amount = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(amount) < 1024) return (unit === "B" ? grouped : oneDecimal).format(amount) + " " + unit;
    amount /= 1024;
  }
  return oneDecimal.format(amount) + " TiB";
}

function formatSeconds(value) {
  if (value === 0) return "–";
  if (value < 0.001) return grouped.format(value * 1e6) + " µs";
  if (value < 1) return oneDecimal.format(value * 1e3) + " ms";
  if (value < 120) return oneDecimal.format(value) + " s";
  if (value < 7200) return grouped.format(value / 60) + " min";
  if (value < 172800) return grouped.format(value / 3600) + " h";
  return grouped.format(value / 86400) + " days";
}

function formatValue(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") return formatBytes(value);
  if (unit === "seconds") return formatSeconds(value);
  return typeof value === "number" ? grouped.format(value) : String(value);
}

// Elements --------------------------------------------------------------------------------------

function createElement(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Create or remove children to match `items`, and update each one.
function updateChildren(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, at) => update(parent.children[at], item, at));
}

function createSvgElement(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Header ---------------------------------------------------------------------------------------

const HEALTH = { ok: ["ready", "ok"], draining: ["draining", ""], unavailable: ["not ready", "bad"] };

function showHealth(word, kind, why) {
  const health = $("health");
  setText(health, word);
  health.className = "health " + kind;
  health.title = why || "";
}

function showHead(facts) {
  setText($("title"), facts.title);
  setText($("subtitle"), facts.subtitle);
  document.title = facts.title + (facts.subtitle ? " · " + facts.subtitle : "");
  const { ready, draining, why } = facts.health;
  const status = draining ? "draining" : ready ? "ok" : "unavailable";
  showHealth(HEALTH[status][0], HEALTH[status][1], why);
}

// The chart -------------------------------------------------------------------------------------

function appendRates(rates) {
  const count = rates.seconds.length;
  const first = rates.first;
  if (first !== state.next) state.rates.clear();  // The program restarted, or seconds were missed.
  const before = Math.max(0, ...[...state.rates.values()].map((line) => line.length));
  for (const name of Object.keys(rates.flows)) {
    if (!state.rates.has(name)) state.rates.set(name, new Array(before).fill(null));
  }
  for (const [name, line] of state.rates) {
    const more = rates.flows[name] || new Array(count).fill(null);
    line.push(...more);
    if (line.length > RATES_MAX) line.splice(0, line.length - RATES_MAX);
  }
  state.next = first + count;
}

function roundUpScale(most) {
  if (most <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  for (const step of [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10]) {
    if (most <= step * power) return step * power;
  }
  return 10 * power;
}

// Rates of the time that the chart shows, by series.
function shownRates() {
  if (state.span.step === 1) return state.rates;
  return state.history && state.history.step === state.span.step ? state.history.rates : new Map();
}

// Steps that the chart shows: one minute of seconds at first, or 60 longer steps.
function shownSteps() {
  const known = Math.max(0, ...[...shownRates().values()].map((line) => line.length));
  return Math.max(60, known) - 1;
}

function formatAge(steps) {
  const time = steps * state.span.step;
  if (time < 300) return `${time} s`;
  return time < 7200 ? `${oneDecimal.format(time / 60)} min` : `${oneDecimal.format(time / 3600)} h`;
}

function showSpans() {
  updateChildren($("spans"), SPANS, () => {
    const button = createElement("button");
    button.type = "button";
    button.addEventListener("click", () => {
      state.span = SPANS[Number(button.dataset.at)];
      state.pointed = null;
      showSpans();
      showChart();
      refreshHistory();
    });
    return button;
  }, (button, span, at) => {
    button.dataset.at = String(at);
    setText(button, span.title);
    button.setAttribute("aria-pressed", String(span === state.span));
  });
}

// Request the rates of a longer time again if a step has passed since the last request.
async function refreshHistory() {
  const { step } = state.span;
  const now = performance.now() / 1000;
  if (step === 1 || (state.history && state.history.step === step && now - state.history.at < step)) return;
  try {
    const answer = await fetch(`history?step=${step}`);
    if (!answer.ok) return;
    const { flows } = await answer.json();
    state.history = { step, at: now, rates: new Map(Object.entries(flows)) };
    showChart();
  } catch { /* The next update of the page tries again. */ }
}

function lastRate(line) {
  return line.length ? line[line.length - 1] : null;
}

function showLegend() {
  updateChildren($("legend"), [...state.rates], () => {
    const button = createElement("button");
    button.type = "button";
    const key = createSvgElement("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
    key.append(createSvgElement("line", { x1: 0, y1: 5, x2: 22, y2: 5 }));
    button.append(key, createElement("span", "label"), createElement("b"));
    button.addEventListener("click", () => {
      const name = button.dataset.name;
      if (!state.hidden.delete(name)) state.hidden.add(name);
      showLegend();
      showChart();
    });
    return button;
  }, (button, [name, line], at) => {
    button.dataset.name = name;
    button.setAttribute("aria-pressed", String(!state.hidden.has(name)));
    const key = button.querySelector("line");
    key.setAttribute("class", `line c${at % 8} d${at % 8}`);
    setText(button.querySelector(".label"), name);
    const rate = lastRate(line);
    setText(button.querySelector("b"), rate === null ? "–" : formatShort(rate));
    button.title = state.hidden.has(name) ? "Show this line" : "Hide this line";
  });
}

function showChart() {
  const svg = $("lines");
  const box = $("chart").getBoundingClientRect();
  const width = Math.max(200, Math.round(box.width) - 2);
  const height = Math.max(120, Math.round(box.height) - 2);
  const left = 58, right = 12, top = 12, bottom = 26;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  // The legend has the colours of the series.
  const names = [...state.rates.keys()];
  const lines = [...shownRates()].map(([name, line]) => ({ name, line, at: Math.max(0, names.indexOf(name)) }));
  const visible = lines.filter(({ name }) => !state.hidden.has(name));
  const most = Math.max(0, ...visible.flatMap(({ line }) => line.filter((v) => v !== null)));
  const high = roundUpScale(most);
  const span = shownSteps();
  const x = (steps) => width - right - (steps / span) * (width - left - right);
  const y = (value) => height - bottom - (value / high) * (height - top - bottom);
  const parts = [];
  for (let step = 0; step <= 4; step++) {
    const value = (high * step) / 4;
    parts.push(createSvgElement("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    const label = createSvgElement("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" });
    label.textContent = formatShort(value);
    parts.push(label);
  }
  const labels = width < 500 ? 3 : 6;
  const step = [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800]
    .find((time) => span * state.span.step <= time * labels) / state.span.step;
  for (let steps = 0; steps < span; steps += step) {
    const label = createSvgElement("text", { class: "tick", x: x(steps), y: height - 8, "text-anchor": steps ? "middle" : "end" });
    label.textContent = steps ? `−${formatAge(steps)}` : "now";
    parts.push(label);
  }
  for (const { line, at } of visible) {
    let path = "", area = "", open = false, start = 0;
    line.forEach((value, index) => {
      const px = x(line.length - 1 - index);
      if (value === null) {
        if (open) area += `L${start} ${y(0)}Z`;
        open = false;
        return;
      }
      path += `${open ? "L" : "M"}${px.toFixed(1)} ${y(value).toFixed(1)}${open ? "" : "h0"}`;  // h0 draws a dot for a single value.
      if (!open) {
        area += `M${px.toFixed(1)} ${y(0)}`;
        start = px.toFixed(1);
      }
      area += `L${px.toFixed(1)} ${y(value).toFixed(1)}`;
      if (index === line.length - 1) area += `L${px.toFixed(1)} ${y(0)}Z`;
      open = true;
    });
    if (at === 0) parts.push(createSvgElement("path", { class: `area c${at % 8}`, d: area }));
    parts.push(createSvgElement("path", { class: `line c${at % 8} d${at % 8}`, d: path }));
  }
  if (state.pointed !== null) {
    const px = x(state.pointed);
    parts.push(createSvgElement("line", { class: "cursor", x1: px, x2: px, y1: top, y2: height - bottom }));
    showTip(visible, px, width);
  }
  $("tip").hidden = state.pointed === null;
  svg.replaceChildren(...parts);
  const sentence = visible
    .filter(({ line }) => lastRate(line) !== null)
    .map(({ name, line }) => `${name} ${formatShort(lastRate(line))}`)
    .join(", ");
  $("chart").setAttribute("aria-label", `Messages per second in the last ${state.span.words}. Now: ${sentence}`);
  const peak = visible.map(({ name, line }) => [Math.max(0, ...line.map((v) => v || 0)), name])
    .sort((a, b) => b[0] - a[0])[0];
  setText($("chart-summary"), peak && peak[0] > 0
    ? `Peak of the last ${state.span.words}: ${formatShort(peak[0])} per second ${peak[1]}.`
    : `No messages in the last ${state.span.words}.`);
}

function showTip(visible, px, width) {
  const tip = $("tip");
  const rows = visible.map(({ name, line }) => {
    const value = line[line.length - 1 - state.pointed];
    return `${name}: ${value === null || value === undefined ? "–" : grouped.format(value)}`;
  });
  setText(tip, [state.pointed ? `${formatAge(state.pointed)} ago` : "now", ...rows].join("\n"));
  tip.style.left = px < width / 2 ? `${px + 12}px` : "auto";
  tip.style.right = px < width / 2 ? "auto" : `${width - px + 12}px`;
}

function moveCursorToPointer(event) {
  const box = $("chart").getBoundingClientRect();
  const part = (event.clientX - box.left - 58) / (box.width - 70);
  state.pointed = Math.round((1 - Math.min(1, Math.max(0, part))) * shownSteps());
  showChart();
}

function moveCursorByKey(event) {
  const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10 }[event.key];
  if (event.key === "Escape") state.pointed = null;
  else if (event.key === "Home") state.pointed = shownSteps();
  else if (event.key === "End") state.pointed = 0;
  else if (step) state.pointed = Math.min(shownSteps(), Math.max(0, (state.pointed ?? 0) + step));
  else return;
  event.preventDefault();
  showChart();
}

// Tiles and notes -------------------------------------------------------------------------------

function showTiles(tiles) {
  updateChildren($("tiles"), tiles, () => {
    const tile = createElement("div");
    tile.append(createElement("dt"), createElement("dd"));
    return tile;
  }, (tile, { title, value, unit }) => {
    setText(tile.firstElementChild, title);
    setText(tile.lastElementChild, unit ? formatValue(value, unit) : formatShort(value));
    tile.title = unit === "bytes" || !unit ? grouped.format(value) : "";
  });
}

function showNotes(notes) {
  const fine = { about: "", sentence: "No slow subscriptions and no lost messages.", is_bad: false };
  updateChildren($("notes"), notes.length ? notes : [fine], () => {
    const item = createElement("li");
    item.append(createElement("span", "mark"), createElement("b"), createElement("span"));
    return item;
  }, (item, note) => {
    item.className = note === fine ? "fine" : note.is_bad ? "bad" : "";
    setText(item.children[0], note === fine ? "✓ " : note.is_bad ? "▲ " : "");
    setText(item.children[1], note.about);
    setText(item.children[2], (note.about ? ": " : "") + note.sentence);
  });
}

// Tables ----------------------------------------------------------------------------------------

function computeRates(table, now) {
  const known = state.before.get(table.key);
  const figures = new Map(table.rows.map((row) => [rowKey(row), row]));
  if (known && now === known.now) return known.rates;
  const rates = new Map();
  if (known && now > known.now) {  // The clock of a restarted program may be behind.
    for (const [name, row] of figures) {
      const old = known.figures.get(name);
      if (!old) continue;
      rates.set(name, row.map((value, at) =>
        typeof value === "number" && typeof old[at] === "number"
          ? Math.max(0, (value - old[at]) / (now - known.now)) : null));
    }
  }
  state.before.set(table.key, { now, figures, rates });
  return rates;
}

// Rows are identified by their first text, and by the second column if it is text.
function rowKey(row) {
  return row.slice(0, 2).filter((value) => typeof value === "string").join("\n");
}

function sortRows(table) {
  const sort = state.sorts.get(table.key);
  if (!sort) return table.rows;
  const [column, descends] = sort;
  const compare = (a, b) => {
    const [x, y] = [a[column], b[column]];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" && typeof y === "number"
      ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
    return descends ? -order : order;
  };
  return [...table.rows].sort(compare);
}

// A row with present work, or with a counter that grew in the last minute.
function isActive(table, row, rate) {
  const key = table.key + "\n" + rowKey(row);
  const now = performance.now() / 1000;
  const grows = rate && table.columns.some((column, at) => column.is_flow && rate[at]);
  if (grows) state.activeAt.set(key, now);
  return table.columns.some((column, at) => column.is_load && row[at])
    || now - (state.activeAt.get(key) ?? -Infinity) < ACTIVE_SECONDS;
}

// The rows of a table that are shown: those found, without idle ones if these are folded.
function shownRows(table, rates) {
  const rows = sortRows(table);
  if (state.search && !state.details) {
    return { rows: rows.filter((row) => row.some((value) =>
      typeof value === "string" && value.toLowerCase().includes(state.search))), idle: 0 };
  }
  if (!table.columns.some((column) => column.is_load)) return { rows, idle: 0 };
  const active = rows.filter((row) => isActive(table, row, rates.get(rowKey(row))));
  const idle = rows.length - active.length;
  if (idle <= IDLE_ROWS_SHOWN_MAX) return { rows, idle: 0 };
  return { rows: state.unfolded.has(table.key) ? rows : active, idle };
}

function newTable() {
  const section = createElement("details");
  const summary = createElement("summary");
  const title = createElement("h2");
  title.append(createElement("span"), createElement("span", "count"));
  summary.append(title);
  const scroll = createElement("div", "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  const table = createElement("table", "cards");
  table.append(createElement("thead"), createElement("tbody"));
  table.firstElementChild.append(createElement("tr"));
  scroll.append(table, createElement("p", "empty"));
  const sorter = createElement("label", "sorter", "Sort by ");
  const choice = createElement("select");
  choice.addEventListener("change", () => {
    const at = Number(choice.value);
    const head = table.tHead.rows[0].children[at];
    if (at < 0) state.sorts.delete(section.dataset.key);
    else state.sorts.set(section.dataset.key, [at, !head.classList.contains("text")]);
    showAllTables();
  });
  sorter.append(choice);
  const fold = createElement("button", "fold");
  fold.type = "button";
  fold.addEventListener("click", () => {
    const { key } = section.dataset;
    if (!state.unfolded.delete(key)) state.unfolded.add(key);
    showAllTables();
  });
  section.append(summary, sorter, scroll, fold);
  return section;
}

function newHead(section) {
  const head = createElement("th");
  head.scope = "col";
  const button = createElement("button");
  button.type = "button";
  button.addEventListener("click", () => {
    const key = section.dataset.key;
    const at = [...head.parentElement.children].indexOf(head);
    const now = state.sorts.get(key);
    const isText = head.classList.contains("text");
    if (!now || now[0] !== at) state.sorts.set(key, [at, !isText]);
    else if (now[1] === !isText) state.sorts.set(key, [at, isText]);
    else state.sorts.delete(key);
    showAllTables();
  });
  head.append(button);
  return head;
}

function isWide(column, at, columns) {
  return column.unit === "text" && at === columns.length - 1 && columns.length > 3;
}

function showTable(section, table, now) {
  if (section.dataset.key !== table.key) {
    section.dataset.key = table.key;
    section.id = "table-" + table.key;
    section.open = !(COLLAPSIBLE.has(table.key) && window.innerWidth < 640);
  }
  const title = section.querySelector("h2");
  const total = table.rows.length + table.left_out;
  setText(title.firstElementChild, table.title);
  setText(title.lastElementChild, table.left_out
    ? ` ${table.rows.length} of ${grouped.format(total)}` : ` ${grouped.format(total)}`);
  section.querySelector(".scroll").setAttribute("aria-label", table.title);
  const element = section.querySelector("table");
  const empty = section.querySelector(".empty");
  const rates = computeRates(table, now);
  const { rows, idle } = shownRows(table, rates);
  element.hidden = !rows.length;
  empty.hidden = Boolean(rows.length);
  setText(empty, state.search && table.rows.length ? "Nothing found." : idle ? "All are idle." : "None.");
  const fold = section.querySelector(".fold");
  const isUnfolded = state.unfolded.has(table.key);
  fold.hidden = !idle;
  fold.setAttribute("aria-expanded", String(isUnfolded));
  setText(fold, `${isUnfolded ? "Hide" : "Show"} ${grouped.format(idle)} idle`);
  const sort = state.sorts.get(table.key);
  updateChildren(element.tHead.rows[0], table.columns, () => newHead(section), (head, column, at) => {
    head.className = column.unit === "text" ? "text" : "";
    setText(head.firstElementChild, column.title);
    head.title = column.hint;
    if (sort && sort[0] === at) head.setAttribute("aria-sort", sort[1] ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  const sorter = section.querySelector(".sorter");
  const titles = ["the usual order", ...table.columns.map((column) => column.title)];
  sorter.hidden = rows.length < 2;
  updateChildren(sorter.querySelector("select"), titles, () => createElement("option"), (option, text, at) => {
    option.value = String(at - 1);
    setText(option, text);
  });
  const chosen = String(sort ? sort[0] : -1);
  const choice = sorter.querySelector("select");
  if (choice.value !== chosen) choice.value = chosen;
  updateChildren(element.tBodies[0], rows, () => createElement("tr"), (line, row) => {
    const rate = rates.get(rowKey(row));
    updateChildren(line, table.columns, () => {
      const cell = createElement(line.children.length ? "td" : "th");
      if (cell.tagName === "TH") cell.scope = "row";
      cell.append(createElement("span", "value"), createElement("span", "rate"));
      return cell;
    }, (cell, column, at) => {
      const value = row[at];
      const isText = column.unit === "text";
      cell.className = isText ? (isWide(column, at, table.columns) ? "text wide" : "text cut") : "";
      if (value === 0 || value === null || value === "") cell.classList.add("zero");
      if (value === null || (isText && value === "")) cell.classList.add("none");
      cell.dataset.title = column.title;
      const text = isText ? String(value ?? "–") || "–" : formatValue(value, column.unit);
      showCell(cell.firstElementChild, text, column.details && value !== "" ? column.details : "");
      cell.title = isText && String(value).length > 30 ? String(value) : "";
      const speed = column.is_flow && rate ? rate[at] : null;
      const unit = column.unit === "bytes" ? formatBytes : formatShort;
      setText(cell.lastElementChild, speed ? unit(speed) + "/s" : "");
    });
  });
}

// Show a text, as a link to the page of the item if it has one.
function showCell(element, text, kind) {
  let link = element.querySelector("a");
  if (!kind) {
    if (link) link.remove();
    setText(element, text);
    return;
  }
  if (!link) {
    link = createElement("a");
    element.replaceChildren(link);
  }
  setText(link, text);
  const target = `#${kind}/${encodeURIComponent(text)}`;
  if (link.getAttribute("href") !== target) link.setAttribute("href", target);
}

function showAllTables() {
  showTables(state.facts);
  if (state.details && state.details.tables) showDetailTables();
}

// Rates are growths over the time between two snapshots, not between two responses.
function showTables(facts) {
  updateChildren($("tables"), facts.tables, newTable, (section, table) => showTable(section, table, facts.taken_at));
}

// Dead letters ----------------------------------------------------------------------------------

const LETTERS = 20;

// Send a request to the API. Returns the reply; the server's reason is the message of an error.
async function callApi(path, body) {
  const options = body === undefined ? {} : {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Simplebus-Request": "1" },
    body: JSON.stringify(body),
  };
  const answer = await fetch("api/v1/" + path, options);
  const reply = await answer.json();
  if (!answer.ok) throw new Error(reply.error);
  return reply;
}

function letterClasses(facts) {
  const { details } = state;
  if (details) return details.kind === "class" && details.hasLetters ? [details.name] : [];
  const dead = facts.tables.find((table) => table.key === "dead");
  return dead ? dead.rows.map((row) => String(row[0])) : [];
}

function showLetterClasses(facts) {
  const names = letterClasses(facts);
  $("letters-section").hidden = !names.length && state.letterClass === null;
  updateChildren($("letter-classes"), names, () => {
    const button = createElement("button");
    button.type = "button";
    button.addEventListener("click", () => {
      state.letterClass = button.dataset.name;
      showLetters("");
      showLetterClasses(state.facts);
    });
    return button;
  }, (button, name) => {
    button.dataset.name = name;
    setText(button, state.details ? "Show the oldest" : name);
    button.setAttribute("aria-pressed", String(name === state.letterClass));
  });
}

// Request the dead letters of the chosen class, and show them below `result`.
async function showLetters(result) {
  const name = state.letterClass;
  let reply = { letters: [], next: null };
  try {
    reply = await callApi(`dead-letters?class=${encodeURIComponent(name)}&count=${LETTERS}&format=text`);
  } catch (error) {
    result = error.message;
  }
  if (name !== state.letterClass) return;  // Another class was chosen meanwhile.
  const more = reply.next === null ? "" : ` The oldest ${reply.letters.length} are shown.`;
  setText($("letters-status"), (result || (reply.letters.length ? "" : "None.")) + more);
  updateChildren($("letters"), reply.letters, newLetter, showLetter);
}

function newLetter() {
  const item = createElement("li");
  const requeue = createElement("button", "", "Requeue");
  const drop = createElement("button", "", "Drop");
  item.append(createElement("b"), createElement("span"), createElement("pre"), requeue, drop);
  requeue.addEventListener("click", () => changeLetter(item, "requeue"));
  drop.addEventListener("click", () => {
    if (item.dataset.armed === item.dataset.sequence) changeLetter(item, "drop");
    item.dataset.armed = item.dataset.sequence;
    setText(drop, "Really drop?");
  });
  requeue.type = drop.type = "button";
  return item;
}

function showLetter(item, letter) {
  item.dataset.sequence = String(letter.sequence);
  delete item.dataset.armed;
  const error = letter.error ? `: ${letter.error}` : "";
  setText(item.children[0], `#${letter.sequence} ${letter.channel}`);
  setText(item.children[1], ` ${letter.reason} at delivery ${letter.attempts}${error}`);
  setText(item.children[2], letter.payload + (letter.is_truncated ? " …" : ""));
  setText(item.children[4], "Drop");
}

async function changeLetter(item, verb) {
  const sequence = Number(item.dataset.sequence);
  let result;
  try {
    const reply = await callApi(`dead-letters/${verb}`, { class: state.letterClass, sequences: [sequence] });
    result = reply.refused.length ? reply.refused[0].error
      : `#${sequence} was ${verb === "drop" ? "dropped" : "requeued"}.`;
  } catch (error) {
    result = error.message;
  }
  await showLetters(result);
}

// Pages of classes and connections --------------------------------------------------------------

// By kind: source of the data, and the values as [field, title, unit].
const PAGES = {
  class: {
    title: "Class",
    path: (name) => `classz?class=${encodeURIComponent(name)}`,
    values: [
      ["stored", "Stored", "count"], ["stored_bytes", "Size", "bytes"],
      ["oldest_seconds", "Age of the oldest", "seconds"], ["floor", "Oldest sequence", "count"],
      ["head", "Next sequence", "count"], ["delivered", "Delivered", "count"],
      ["redelivered", "Redelivered", "count"], ["acknowledged", "Acknowledged", "count"],
      ["dead_letters", "Dead letters", "count"], ["channels", "Channels", "count"],
      ["policy", "If the class is full", "text"], ["retention", "Retention", "text"],
      ["subjects", "NATS subjects", "text"], ["dropped", "Dropped", "text"],
    ],
  },
  session: {
    title: "Session",
    path: (name) => `sessionz?session=${encodeURIComponent(name)}`,
    values: [
      ["name", "Name", "text"], ["peer", "Peer", "text"], ["user", "User", "text"],
      ["version", "Protocol version", "text"], ["unconfirmed", "Not confirmed", "count"],
      ["parked", "Wait for space", "count"], ["pending_bytes", "Pending", "bytes"],
      ["full_seconds", "Reads nothing for", "seconds"], ["heartbeat", "Heartbeat", "seconds"],
      ["refused", "Refused", "text"],
    ],
  },
  client: {
    title: "NATS client",
    path: (name) => `connz?cid=${encodeURIComponent(name)}&subs=1`,
    values: [
      ["name", "Name", "text"], ["ip", "Address", "text"], ["lang", "Library", "text"],
      ["version", "Version", "text"], ["uptime", "Connected for", "text"], ["idle", "Idle for", "text"],
      ["in_msgs", "Published", "count"], ["out_msgs", "Sent", "count"],
      ["in_bytes", "Published bytes", "bytes"], ["out_bytes", "Sent bytes", "bytes"],
      ["pending_bytes", "Waiting", "bytes"], ["subscriptions", "Subscriptions", "count"],
    ],
  },
};
const COUNT = { unit: "count", hint: "", is_flow: false };
const TEXT = { unit: "text", hint: "", is_flow: false };

function formatDetail(value) {
  if (Array.isArray(value)) return value.join(" ");
  if (value === null || typeof value !== "object") return value;
  return Object.entries(value).map(([why, count]) => `${why} ${grouped.format(count)}`).join(", ");
}

function positionName(position) {
  const { durable, group, number } = position;
  if (!durable && !group) return `subscription ${number}`;
  return [durable && `durable ${durable}`, group && `group ${group}`].filter(Boolean).join(", ");
}

// The tables of a page, in the format of those of /facts.
function detailTables(kind, found) {
  if (kind === "client") {
    const rows = (found.subscriptions_list || []).map((subject) => [subject]);
    return [{ key: "subjects", title: "Subjects", columns: [{ ...TEXT, title: "Subject" }], rows, left_out: 0 }];
  }
  const positions = {
    key: "positions", title: "Durables, groups and subscriptions", left_out: found.positions_left_out,
    columns: [
      ...(kind === "class" ? [{ ...TEXT, title: "Name" }, { ...TEXT, title: "Session", details: "session" }]
        : [{ ...TEXT, title: "Class", details: "class" }, { ...TEXT, title: "Name" }]),
      { ...TEXT, title: "Channels" },
      { ...COUNT, title: "Lag" }, { ...COUNT, title: "Unsent" }, { ...COUNT, title: "In flight" },
      { ...COUNT, title: "Delivered", is_flow: true }, { ...COUNT, title: "Redelivered", is_flow: true },
      { ...COUNT, title: "Acknowledged", is_flow: true }, { ...COUNT, title: "Cursor" },
      { ...TEXT, title: "Waiting for" },
    ],
    rows: found.positions.map((each) => [
      ...(kind === "class" ? [positionName(each), each.session < 0 ? "" : String(each.session)]
        : [found.class_names[each.class_id] || String(each.class_id), positionName(each)]),
      each.patterns.join(" "), each.lag, each.unsent, each.in_flight, each.delivered,
      each.redelivered, each.acknowledged, each.cursor, each.waits_for,
    ]),
  };
  if (kind !== "class" || !found.publishers.length) return [positions];
  return [positions, {
    key: "publishers", title: "Publishers that wait for space", left_out: found.publishers_left_out,
    columns: [{ ...TEXT, title: "Session", details: "session" }, { ...TEXT, title: "Name" },
      { ...COUNT, title: "Messages" }, { ...COUNT, title: "Bytes", unit: "bytes" },
      { ...COUNT, title: "Waits for", unit: "seconds" }],
    rows: found.publishers.map((each) =>
      [each.session < 0 ? "" : String(each.session), each.name, each.messages, each.bytes, each.seconds]),
  }];
}

function showDetailTables() {
  const { details } = state;
  updateChildren($("details-tables"), details.tables, newTable,
    (section, table) => showTable(section, table, details.now));
}

async function refreshDetails() {
  const { details } = state;
  if (!details) return;
  const page = PAGES[details.kind];
  let found = null, status = "";
  try {
    const answer = await fetch(page.path(details.name));
    found = await answer.json();
    if (!answer.ok) throw new Error(found.error || `HTTP ${answer.status}`);
    if (details.kind === "client") {
      found = found.connections[0];
      if (!found) throw new Error(`There is no client ${details.name}.`);
    }
    status = found.waits_for || "";
  } catch (error) {
    [found, status] = [null, error.message];
  }
  if (details !== state.details) return;  // Another page was opened meanwhile.
  setText($("details-status"), status);
  if (found && details.kind === "class" && found.name) setText($("details-title"), `Class ${found.name}`);
  const values = !found ? [] : page.values
    .map(([field, title, unit]) => [title, formatDetail(found[field]), unit])
    .filter(([, value]) => value !== "" && value !== undefined && value !== null);
  updateChildren($("details-values"), values, () => {
    const tile = createElement("div");
    tile.append(createElement("dt"), createElement("dd"));
    return tile;
  }, (tile, [title, value, unit]) => {
    setText(tile.firstElementChild, title);
    setText(tile.lastElementChild, formatValue(value, unit));
    tile.className = unit !== "text" ? "" : String(value).length > 14 ? "text long" : "text";
  });
  details.now = performance.now() / 1000;
  details.tables = found ? detailTables(details.kind, found) : [];
  details.hasLetters = Boolean(found && (found.dead_letters || details.name.startsWith("dead.")));
  showDetailTables();
  $("messages-section").hidden = !(found && details.kind === "class");
  $("disconnect").hidden = !(found && details.kind === "session");
  if (state.facts) showLetterClasses(state.facts);
}

// Show the page of the item that the fragment of the address names, or the overview.
function openPage() {
  const [kind, encoded] = location.hash.slice(1).split("/");
  if (kind === "main") return;  // The link that skips the header.
  const isKnown = Object.hasOwn(PAGES, kind) && encoded !== undefined;
  let name = encoded;
  try {
    name = decodeURIComponent(encoded);
  } catch { /* The name is not encoded: the server replies that it is unknown. */ }
  state.details = isKnown ? { kind, name, tables: null, hasLetters: false } : null;
  state.letterClass = null;
  for (const key of ["positions", "publishers"]) state.before.delete(key);
  $("overview").hidden = isKnown;
  $("details").hidden = !isKnown;
  for (const id of ["letters", "messages", "details-tables", "details-values"]) $(id).replaceChildren();
  for (const id of ["letters-status", "messages-status", "details-status", "disconnect-status"]) setText($(id), "");
  $("messages-next").hidden = true;
  $("messages-section").hidden = $("disconnect").hidden = true;
  setText($("disconnect"), "Disconnect");
  if (isKnown) {
    setText($("details-title"), `${PAGES[kind].title} ${state.details.name}`);
    refreshDetails();
  }
  if (state.facts) {
    showLetterClasses(state.facts);
    showChart();
  }
  window.scrollTo(0, 0);
}

async function showMessages(first) {
  const { details } = state;
  let reply = { messages: [], next: null }, status = "";
  try {
    reply = await callApi(`messages?class=${encodeURIComponent(details.name)}&count=${LETTERS}&first=${first}&format=text`);
    status = reply.messages.length ? "" : "None.";
  } catch (error) {
    status = error.message;
  }
  if (details !== state.details) return;
  setText($("messages-status"), status);
  $("messages-next").hidden = reply.next === null;
  $("messages-next").dataset.first = String(reply.next);
  updateChildren($("messages"), reply.messages, () => {
    const item = createElement("li");
    item.append(createElement("b"), createElement("span"), createElement("pre"));
    return item;
  }, (item, message) => {
    const parts = message.headers.map(([header, value]) => `${header}=${value}`);
    if (message.key) parts.unshift(`key=${message.key}`);
    setText(item.children[0], `#${message.sequence} ${message.channel}`);
    setText(item.children[1], " " + parts.join(" "));
    setText(item.children[2], message.payload + (message.is_truncated ? " …" : ""));
  });
}

async function disconnect() {
  const button = $("disconnect");
  if (button.textContent === "Disconnect") {
    setText(button, "Really disconnect?");
    return;
  }
  setText(button, "Disconnect");
  try {
    setText($("disconnect-status"), (await callApi("disconnect", { session: Number(state.details.name) })).result);
  } catch (error) {
    setText($("disconnect-status"), error.message);
  }
}

// Updates ---------------------------------------------------------------------------------------

function showUpdate(reply, now) {
  state.facts = reply.facts;
  state.updatedAt = now;
  appendRates(reply.rates);
  showHead(reply.facts);
  showLegend();
  refreshHistory();
  refreshDetails();
  showChart();
  showTiles(reply.facts.tiles);
  showNotes(reply.facts.notes);
  showTables(reply.facts);
  showLetterClasses(reply.facts);
  setText($("updated"), "Updated at " + new Date().toLocaleTimeString() + ".");
  document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
}

async function requestFacts() {
  const abortController = new AbortController();
  const timer = setTimeout(() => abortController.abort(), TIMEOUT_SECONDS * 1000);
  try {
    const answer = await fetch(`facts?since=${state.next}`, { signal: abortController.signal });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    showUpdate(await answer.json(), performance.now() / 1000);
  } catch (error) {
    const silentSeconds = performance.now() / 1000 - state.updatedAt;
    if (silentSeconds > 2 * INTERVAL_SECONDS) showHealth("no answer", "bad", String(error));
  } finally {
    clearTimeout(timer);
  }
}

async function pollFacts() {
  for (;;) {
    if (!state.isPaused && !document.hidden) await requestFacts();
    await new Promise((wake) => setTimeout(wake, INTERVAL_SECONDS * 1000));
  }
}

function start() {
  const pause = $("pause");
  pause.addEventListener("click", () => {
    state.isPaused = !state.isPaused;
    pause.setAttribute("aria-pressed", String(state.isPaused));
    setText(pause, state.isPaused ? "Resume" : "Pause");
    if (state.isPaused) showHealth("paused", "", "");
  });
  const chart = $("chart");
  chart.addEventListener("pointermove", moveCursorToPointer);
  chart.addEventListener("pointerdown", moveCursorToPointer);
  chart.addEventListener("pointerleave", () => { state.pointed = null; showChart(); });
  chart.addEventListener("keydown", moveCursorByKey);
  chart.addEventListener("blur", () => { state.pointed = null; showChart(); });
  window.addEventListener("resize", showChart);
  window.addEventListener("hashchange", openPage);
  $("search").addEventListener("input", (event) => {
    state.search = event.target.value.trim().toLowerCase();
    if (state.facts) showAllTables();
  });
  $("messages-first").addEventListener("click", () => showMessages(0));
  $("messages-next").addEventListener("click", (event) => showMessages(event.target.dataset.first));
  $("disconnect").addEventListener("click", disconnect);
  showSpans();
  openPage();
  pollFacts();
}

start();
