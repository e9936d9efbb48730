"use strict";
// Draws the plan that the slider stands at. All text is made by Python: nothing is rounded or named here.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const at = (id) => document.getElementById(id);
  const data = read("data");
  const text = (i) => data.texts[i];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const make = (tag, content, attributes = {}) => {
    const made = document.createElement(tag);
    made.append(...[content].flat());
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  let now = data.start;
  let chosen = null; // name of the selected value
  let picked; // its place among the values
  let models = {};
  const operators = () => at("by-operators").checked;
  const X = (stop, moment) => (operators() ? moment : stop.times[moment]);

  // One polygon for each named value, on top of what was there before it and still is. What lies above a value
  // that ends moves down, so only then are there further corners. Kept values come first, then the small outputs
  // and gradients that are summed up, then the others. Beside the polygons: bytes kept at each column.
  function stacked(stop) {
    const v = stop.values, n = v.first.length, events = new Map();
    const note = (moment, i, born) => {
      if (!events.has(moment)) events.set(moment, { born: [], gone: [] });
      events.get(moment)[born ? "born" : "gone"].push(i);
    };
    for (let i = 0; i < n; i++) { note(v.first[i], i, true); note(v.last[i] + 1, i, false); }
    const shapes = Array.from({ length: n }, () => ({ x: [], y: [] }));
    const place = new Float64Array(n), alive = [], c = stop.columns;
    const columnOf = (moment) => Math.min(c.x.length - 1, Math.floor((moment * c.x.length) / stop.moments));
    const keptAt = c.x.map(() => 0);
    for (let i = 0; i < n; i++) {
      if (v.kept[i]) for (let k = columnOf(v.first[i]); k <= columnOf(v.last[i]); k++) keptAt[k] += v.bytes[i];
    }
    for (const moment of [...events.keys()].sort((a, b) => a - b)) {
      const { born, gone } = events.get(moment);
      for (const i of gone) { shapes[i].x.push(moment); shapes[i].y.push(place[i]); }
      const over = new Set(gone);
      for (let k = alive.length - 1; k >= 0; k--) if (over.has(alive[k])) alive.splice(k, 1);
      for (const i of born) { // kept values come before the others, each by the moment it begins
        let k = alive.length;
        while (k > 0 && v.kept[alive[k - 1]] < v.kept[i]) k--;
        alive.splice(k, 0, i);
      }
      const fresh = new Set(born);
      let height = stop.base, above = false;
      for (const i of alive) {
        if (!above && !v.kept[i]) { height += c.small[columnOf(moment)] + c.again[columnOf(moment)]; above = true; }
        if (fresh.has(i)) { shapes[i].x.push(moment); shapes[i].y.push(height); }
        else if (place[i] !== height) {
          shapes[i].x.push(moment, moment);
          shapes[i].y.push(place[i], height);
        }
        place[i] = height;
        height += v.bytes[i];
      }
    }
    const size = data.scale.size;
    return [shapes.map(({ x, y }, i) => [
      [...x, ...x.slice().reverse()].map((moment) => X(stop, moment)),
      [...y.map((b) => b / size), ...y.slice().reverse().map((b) => (b + v.bytes[i]) / size)],
    ]), keptAt];
  }

  function colors(stop) {
    let turn = 0;
    return stop.values.kind.map((kind) => {
      const name = data.kinds[kind].color;
      return css(name === "kept" && turn++ % 2 ? "kept-next" : name);
    });
  }

  function drawPlots(stop) {
    const size = data.scale.size, c = stop.columns, [shapes, keptAt] = stacked(stop);
    const end = X(stop, stop.moments), edges = [...c.x, stop.moments].map((moment) => X(stop, moment));
    const high = c.nbytes.map((b) => b / size);
    const area = (heights) => ({ x: edges, y: [...heights, heights[heights.length - 1]], low: edges.map(() => 0) });
    models.total.data = area(high);
    models.again.data = area(c.again.map((b, k) => (b && (stop.base + b + c.small[k] + keptAt[k])) / size));
    models.small.data = area(c.small.map((b, k) => (b && (stop.base + b + keptAt[k])) / size));
    models.cells.data = { left: edges.slice(0, -1), right: edges.slice(1), bottom: c.x.map(() => 0), top: high };
    models.inputs.data = { left: [0], right: [end], bottom: [0], top: [stop.base / size] };
    models.values.data = { xs: shapes.map((s) => s[0]), ys: shapes.map((s) => s[1]), color: colors(stop) };
    models.shapes = shapes;
    models.boundary.location = X(stop, stop.boundary);
    for (const half of ["forward", "backward"]) models.all.get_model_by_name(half).x = X(stop, stop.boundary);
    models.peak.data = { x: [(X(stop, stop.peak.moment) + X(stop, stop.peak.moment + 1)) / 2], y: [stop.peak.nbytes / size] };
    const w = data.without;
    models.without.data = w.x.length
      ? { x: operators() ? w.x : w.times, y: w.nbytes.map((b) => b / size) }
      : w.peak ? { x: [0, end], y: [w.peak / size, w.peak / size] } : { x: [], y: [] };
    models.range.setv({ start: 0, end: Math.max(end, ...models.without.data.x.slice(-1)) });
    at("axis").textContent = data.axes[Number(operators())];
    nameBlocks();
    if (models.now) models.now.data = { x: [stop.point[0]], y: [stop.point[1]] };
  }

  // Names the module of each block where it lies still for long enough to hold the text.
  function nameBlocks() {
    const v = data.stops[now].values, figure = models.figures[0], size = data.scale.size;
    const rows = { x: [0], y: [0], text: [""], color: [css("ink")] }; // Bokeh fails to draw colors of no texts
    const wide = figure.inner_width / (models.range.end - models.range.start);
    const tall = figure.inner_height / (figure.y_range.end - figure.y_range.start);
    models.shapes.forEach(([xs, ys], i) => {
      const name = text(v.block[i]), high = v.bytes[i] / size;
      if (!name || high * tall < 12) return;
      let longest = 0;
      for (let k = 0; k < xs.length / 2 - 1; k++) if (xs[k + 1] - xs[k] > xs[longest + 1] - xs[longest]) longest = k;
      if ((xs[longest + 1] - xs[longest]) * wide < name.length * 6.5) return;
      rows.x.push((xs[longest] + xs[longest + 1]) / 2);
      rows.y.push(ys[longest] + high / 2);
      rows.text.push(name);
      rows.color.push({ kept: "#ffffff", temporary: css("ink") }[data.kinds[v.kind[i]].color] || "#111111");
    });
    models.blocks.data = rows;
  }

  // A table that is sorted by the button at the head of each column.
  function table(id, columns, rows, first) {
    const head = make("tr", []), body = make("tbody", []);
    const made = rows.map((row, i) => ({ row, i, tr: rowOf(columns, row) }));
    let by = -1, down = true;
    const sort = (k, downwards) => {
      [by, down] = [k, downwards];
      const key = columns[k].key, way = down ? -1 : 1;
      made.sort((a, b) => {
        const x = a.row[key], y = b.row[key];
        if (x === null || y === null) return (x === null) - (y === null) || a.i - b.i;
        return (x < y ? -1 : x > y ? 1 : 0) * way || a.i - b.i;
      });
      body.replaceChildren(...made.map((m) => m.tr));
      [...head.children].forEach((th, j) => th.setAttribute("aria-sort", j === by ? (down ? "descending" : "ascending") : "none"));
    };
    columns.forEach((column, k) => {
      const button = make("button", column.label, { type: "button" });
      button.onclick = () => { sort(k, k === by ? !down : column.number === true); remember[id] = [by, down]; };
      head.append(make("th", button, { scope: "col", class: column.number ? "number" : "" }));
    });
    const target = at(id);
    target.className = "stack";
    target.replaceChildren(make("thead", head), body);
    sort(...(remember[id] || [first, true]));
    return made;
  }
  const remember = {};

  function rowOf(columns, row) {
    return make("tr", columns.map((column) => {
      const cell = make("td", column.show(row), { class: column.class || (column.number ? "number" : "") });
      if (column.number && column.label !== "bytes") cell.setAttribute("data-label", column.label);
      return cell;
    }));
  }

  function drawTables(stop) {
    const v = stop.values, rows = [];
    v.kept.forEach((kept, i) => {
      if (kept) rows.push({ i, name: text(v.name[i]), op: text(v.op[i]), bytes: v.bytes[i], said: text(v.said[i]), price: v.price[i], cost: text(v.cost[i]), source: text(v.source[i]) });
    });
    const made = table("kept", [
      { key: "name", label: "value", class: "name", show: (r) => r.name },
      { key: "bytes", label: "bytes", number: true, show: (r) => r.said },
      { key: "op", label: "operator", show: (r) => r.op },
      { key: "price", label: "cost saved", number: true, show: (r) => r.cost },
      { key: "source", label: "source line", class: "code wide", show: (r) => r.source },
    ], rows, 1);
    for (const { row, tr } of made) {
      tr.tabIndex = -1;
      tr.dataset.name = row.name;
      tr.setAttribute("aria-selected", "false");
      tr.onclick = () => choose(chosen === row.name ? null : row.name);
      tr.onfocus = () => { for (const other of at("kept").tBodies[0].rows) other.tabIndex = other === tr ? 0 : -1; };
    }
    if (at("kept").tBodies[0].rows.length) at("kept").tBodies[0].rows[0].tabIndex = 0;
    at("kept").closest(".scroll").hidden = !rows.length;
    at("kept-text").textContent = text(stop.keptText);
    const a = stop.again;
    table("again", [
      { key: "op", label: "operator", show: (r) => r.op },
      { key: "cost", label: "cost", number: true, show: (r) => text(r.costText) },
      { key: "count", label: "runs", number: true, show: (r) => String(r.count) },
      { key: "bytes", label: "bytes if kept", number: true, show: (r) => text(r.bytesText) },
      { key: "source", label: "source line", class: "code wide", show: (r) => r.source },
    ], a.op.map((op, i) => ({ op: text(op), cost: a.cost[i], costText: a.costText[i], count: a.count[i], bytes: a.bytes[i], bytesText: a.bytesText[i], source: text(a.source[i]) })), 1);
    at("again").closest(".scroll").hidden = !a.op.length;
    at("again-text").textContent = text(stop.againText);
  }

  at("kept").addEventListener("keydown", (event) => {
    const row = event.target.closest("tbody tr");
    if (!row) return;
    const all = [...at("kept").tBodies[0].rows], k = all.indexOf(row);
    const to = { ArrowDown: k + 1, ArrowUp: k - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined && all[to]) all[to].focus();
    else if (event.key === "Enter" || event.key === " ") row.click();
    else if (event.key === "Escape") choose(null);
    else return;
    event.preventDefault();
  });

  // Selects a value in the picture and in the table. What is computed twice has one name: the picture says which is
  // meant, the table means the one that is kept.
  function choose(name, fromPicture = false, place = -1) {
    chosen = name;
    const stop = data.stops[now], v = stop.values;
    const named = name === null ? [] : [...v.name.keys()].filter((k) => text(v.name[k]) === name);
    const i = place >= 0 ? place : named.find((k) => v.kept[k]) ?? named[0] ?? -1;
    let shown = null;
    for (const tr of at("kept").tBodies[0].rows) {
      const on = i >= 0 && v.kept[i] === 1 && tr.dataset.name === name;
      tr.setAttribute("aria-selected", String(on));
      if (on) shown = tr;
    }
    if (fromPicture && shown) {
      const frame = shown.closest(".scroll");
      frame.scrollTop = shown.offsetTop - frame.clientHeight / 2;
    }
    at("picked").textContent = i < 0 ? "" : `Selected: ${told(stop, i).join(" · ")}`;
    picked = i < 0 ? undefined : i;
    const indices = i < 0 ? [] : [i];
    if (String(models.values.selected.indices) !== String(indices)) models.values.selected.indices = indices;
  }

  function told(stop, i) {
    const v = stop.values;
    return [text(v.name[i]), text(v.op[i]), text(v.module[i]), text(v.shape[i]), `${text(v.said[i])}, ${data.kinds[v.kind[i]].label}`, text(v.source[i]),
      v.price[i] === null ? "" : `recomputing it would cost ${text(v.cost[i])}`].filter((part) => part);
  }

  window.rematHover = (what, cb) => {
    const tip = at("tip"), stop = data.stops[now], found = cb.index.indices, box = at(what === "point" ? "frontier" : "timeline").getBoundingClientRect();
    if (what === "value") window.rematHover.value = found.length ? found[0] : null;
    if (what === "cell" && window.rematHover.value !== null && window.rematHover.value !== undefined) return;
    if (!found.length) { if (what !== "value") tip.hidden = true; return; }
    const i = found[0];
    tip.textContent = what === "value" ? told(stop, i).join("\n")
      : what === "point" ? data.points[i]
      : `${text(stop.columns.said[i])} alive\nwhile ${text(stop.columns.op[i])} runs`;
    tip.hidden = false;
    const x = box.left + cb.geometry.sx, y = box.top + cb.geometry.sy;
    tip.style.left = `${window.scrollX + Math.max(8, Math.min(x + 14, window.innerWidth - tip.offsetWidth - 24))}px`;
    tip.style.top = `${window.scrollY + y + 16}px`;
  };

  function draw() {
    const stop = data.stops[now];
    at("plan-name").textContent = stop.label;
    at("cards").replaceChildren(...stop.cards.map(([name, value, beside]) =>
      make("div", [make("dt", name), make("dd", value, { class: "big" }), make("dd", beside, { class: "small" })])));
    at("rows").replaceChildren(...stop.rows.flatMap(([name, said]) => [make("dt", name), make("dd", said)]));
    at("timeline-text").textContent = stop.peak.text;
    const slider = at("budget");
    if (slider) { slider.value = now; slider.setAttribute("aria-valuetext", stop.spoken); at("budget-now").textContent = stop.spoken; }
    models.values.selected.indices = [];
    drawPlots(stop);
    drawTables(stop);
    choose(chosen);
  }

  // Bokeh draws on a canvas, which knows no style sheet: colors are handed over, and again when they change.
  function paint() {
    const quiet = css("quiet"), line = css("line");
    for (const figure of models.figures) {
      for (const axis of [...figure.below, ...figure.left]) axis.setv({
        axis_label_text_color: quiet, major_label_text_color: quiet, axis_line_color: line, major_tick_line_color: line,
      });
      for (const grid of figure.center) if ("grid_line_color" in grid) grid.grid_line_color = line;
    }
    models.boundary.line_color = quiet;
    for (const half of ["forward", "backward"]) models.all.get_model_by_name(half).text_color = css("ink");
    for (const [name, part, color] of data.paint) {
      const renderer = models.all.get_model_by_name(name);
      for (const glyph of renderer ? [renderer.glyph, renderer.nonselection_glyph, renderer.selection_glyph] : []) if (glyph && glyph[part] !== undefined) glyph[part] = css(color);
    }
    const selected = models.all.get_model_by_name("values").selection_glyph;
    selected.setv({ fill_color: css("mark"), line_color: css("mark") });
    models.values.data = { ...models.values.data, color: colors(data.stops[now]) };
    nameBlocks();
    at("legend").replaceChildren(...data.legend.map(([color, label]) => {
      const swatch = make("i", []);
      swatch.style.background = `var(--${color})`;
      return make("li", [swatch, label]);
    }));
  }

  async function begin() {
    for (const [id, item] of Object.entries(read("plots"))) if (at(id)) await Bokeh.embed.embed_item(item, id);
    const find = (name) => Bokeh.documents.map((d) => d.get_model_by_name(name)).find((m) => m);
    const source = (name) => (find(name) ? find(name).data_source : undefined);
    models = Object.fromEntries(["total", "again", "small", "cells", "inputs", "values", "blocks", "without", "peak", "now"].map((name) => [name, source(name)]));
    models.all = { get_model_by_name: find };
    models.figures = ["timeline-figure", "frontier-figure"].map(find).filter((m) => m);
    models.boundary = find("boundary");
    models.range = find("timeline-figure").x_range;
    at("by-operators").checked = !data.axes[0];
    at("by-operators-label").hidden = !data.axes[0];
    draw();
    paint();
    at("by-operators").onchange = draw;
    // Later: Bokeh is drawing when its width changes.
    models.figures[0].properties.inner_width.change.connect(() => setTimeout(nameBlocks));
    at("timeline").addEventListener("keydown", (event) => {
      const v = data.stops[now].values, step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const to = picked === undefined ? 0 : picked + step;
      if (event.key === "Escape") choose(null);
      else if (step && to >= 0 && to < v.name.length) choose(text(v.name[to]), true, to);
      else if (!step) return;
      event.preventDefault();
    });
    models.values.selected.properties.indices.change.connect(() => {
      const [i] = models.values.selected.indices;
      const name = i === undefined ? null : text(data.stops[now].values.name[i]);
      if (i !== picked) choose(name, true, i ?? -1);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    for (const id of ["timeline", "frontier"]) if (at(id)) at(id).addEventListener("mouseleave", () => { at("tip").hidden = true; });
    const slider = at("budget");
    if (slider) slider.addEventListener("input", () => { now = Number(slider.value); draw(); });
    for (const button of document.querySelectorAll("[data-stop]")) button.onclick = () => { now = Number(button.dataset.stop); draw(); };
    requestAnimationFrame(() => requestAnimationFrame(() => { window.rematDrawnMs = performance.now(); }));
  }
  window.addEventListener("load", begin);
})();
