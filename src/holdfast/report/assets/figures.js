/* Draws a page model (see holdfast.report.page) with uPlot and plain canvas. No other dependency, no network.
   Every text enters the page as text, never as markup. */
"use strict";
const Holdfast = (() => {
  const GRID_STEPS = 200, GRID_MISSING = 255;  // as in holdfast.report.panels
  const PANEL_HEIGHT = 300;
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

  // ---------------------------------------------------------------- small helpers

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }

  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  function shown(value, percent) {
    if (value === null || value === undefined) return "–";
    if (percent) return `${(100 * value).toFixed(1)} %`;
    const size = Math.abs(value);
    return Number.isInteger(value) ? value.toLocaleString("en") : size >= 1e-3 && size < 1e5 ? String(+value.toPrecision(4)) : value.toExponential(2);
  }

  function thinned(length, limit) {
    if (length <= limit) return [...Array(length).keys()];
    return [...new Set([...Array(limit).keys()].map(i => Math.round(i * (length - 1) / (limit - 1))))];
  }

  function bytes(base64) {
    const text = atob(base64), array = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
    return array;
  }

  function niceTicks(low, high, about) {
    const rough = (high - low || 1) / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
    return ticks;
  }

  // ---------------------------------------------------------------- colours

  let palette;

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shades = () => palette[isDark() ? "dark" : "light"];
  const colourOf = number => shades().series[number % shades().series.length];
  const variantOf = number => Math.floor(number / shades().series.length) % palette.dashes.length;
  const dashOf = series => series.dashed ? [5, 4] : palette.dashes[variantOf(series.colour)];

  function rgb(hex) { return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)); }

  function ramp(share) {
    const stops = shades().ramp, place = clamp(share, 0, 1) * (stops.length - 1), at = Math.min(stops.length - 2, Math.floor(place));
    const from = rgb(stops[at]), to = rgb(stops[at + 1]), mix = place - at;
    return from.map((channel, i) => Math.round(channel + (to[i] - channel) * mix));
  }

  function marker(context, variant, x, y, size) {
    context.beginPath();
    if (variant === 1) context.rect(x - size, y - size, 2 * size, 2 * size);
    else if (variant === 2) { context.moveTo(x, y - 1.2 * size); context.lineTo(x + 1.2 * size, y + size); context.lineTo(x - 1.2 * size, y + size); context.closePath(); }
    else if (variant === 3) { context.moveTo(x, y - 1.4 * size); context.lineTo(x + 1.4 * size, y); context.lineTo(x, y + 1.4 * size); context.lineTo(x - 1.4 * size, y); context.closePath(); }
    else context.arc(x, y, size, 0, 2 * Math.PI);
    context.fill();
  }

  // ---------------------------------------------------------------- tooltip and announcements

  const tip = el("div", { class: "tip", hidden: "" });
  const announcer = el("div", { class: "unseen", role: "status", "aria-live": "polite" });

  function showTip(title, rows, left, top) {
    tip.replaceChildren(el("strong", {}, title), ...rows.map(([name, value, colour]) => {
      const swatch = el("i", {});
      if (colour) swatch.style.background = colour;
      return el("div", {}, swatch, el("span", {}, name), el("b", {}, value));
    }));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${left + 14 + box.width > innerWidth ? Math.max(4, left - box.width - 14) : left + 14}px`;
    tip.style.top = `${clamp(top - box.height / 2, 4, innerHeight - box.height - 4)}px`;
  }

  const hideTip = () => { tip.hidden = true; };
  const announce = (title, rows) => { announcer.textContent = `${title}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}`; };

  // ---------------------------------------------------------------- panels drawn by uPlot: lines and scatter

  function axis(label, values, bare) {
    const grid = { stroke: css("--grid"), width: 1 };
    return {
      show: !bare, label: label || undefined, labelSize: 20, labelGap: 0, labelFont: FONT, font: FONT, stroke: css("--muted"), size: 26,
      grid, ticks: { ...grid, size: 4 }, gap: 4, ...(values ? { values } : {}),
    };
  }

  function percentTicks(plot, ticks) {
    const step = ticks.length > 1 ? 100 * Math.abs(ticks[1] - ticks[0]) : 1;
    const digits = [0, 1, 2, 3, 4].find(d => Math.abs(step * 10 ** d - Math.round(step * 10 ** d)) < 1e-6) ?? 5;
    return ticks.map(value => `${(100 * value).toFixed(digits)} %`);
  }

  class UPlotPanel {
    constructor(host, panel, hidden) {
      Object.assign(this, { host, panel, hidden });
      this.plot = null;
      host.addEventListener("keydown", event => this.key(event));
      host.addEventListener("mouseleave", hideTip);
      host.addEventListener("blur", hideTip);
    }

    update(panel) {
      const same = this.plot && panel.series.length === this.panel.series.length;
      this.panel = panel;
      if (!same) return this.draw();
      this.prepare();
      this.plot.setData(this.data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
    }

    draw() {
      const zoom = this.zoomed && { min: this.plot.scales.x.min, max: this.plot.scales.x.max };
      if (this.plot) this.plot.destroy();
      this.prepare();
      const width = Math.max(240, this.host.clientWidth);
      const { x_label, y_label, percent, x_percent, bare } = this.panel;
      const options = {
        width, height: PANEL_HEIGHT, pxAlign: 0, padding: [10, 14, 0, 0],
        legend: { show: false },
        axes: [
          axis(x_label, x_percent ? percentTicks : null, bare),
          { ...axis(y_label, percent ? percentTicks : null, bare), size: (u, values) => 16 + 7 * Math.max(2, ...(values || [""]).map(v => String(v).length)) },
        ],
        cursor: { drag: { x: true, y: false, dist: 6 }, y: false, points: { size: 7 } },
        hooks: { setCursor: [plot => this.hover(plot)], setScale: [(plot, key) => { if (key === "x") this.scaled(plot); }] },
        ...this.options(),
      };
      this.plot = new uPlot(options, this.data, this.host);
      this.plot.over.setAttribute("aria-hidden", "true");
      if (zoom) this.plot.setScale("x", zoom);
    }

    scaled(plot) {
      const xs = plot.data[0], { min, max } = plot.scales.x;
      this.zoomed = xs.length > 1 && (min > xs[0] || max < xs[xs.length - 1]);
    }

    resize() { if (this.plot && this.host.clientWidth > 0 && this.plot.width !== this.host.clientWidth) this.plot.setSize({ width: Math.max(240, this.host.clientWidth), height: PANEL_HEIGHT }); }

    toggle() { this.draw(); }

    hover(plot) {
      const { left, top, event } = plot.cursor;
      if (left < 0 || !event) return hideTip();
      const found = this.near(plot, left, top);
      if (!found) return hideTip();
      showTip(found.title, found.rows, event.clientX, event.clientY);
    }

    key(event) {
      const plot = this.plot, xs = plot.data[0];
      const last = xs.length - 1, at = this.at ?? -1;
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last };
      if (event.key in moves) {
        this.at = clamp(moves[event.key], 0, last);
        const left = plot.valToPos(xs[this.at], "x"), found = this.near(plot, left, null);
        if (left < 0 || left > plot.over.clientWidth) plot.setScale("x", { min: xs[0], max: xs[last] });
        plot.setCursor({ left, top: plot.over.clientHeight / 2 }, false);
        if (found) {
          const box = plot.over.getBoundingClientRect();
          showTip(found.title, found.rows, box.left + left, box.top + box.height / 2);
          announce(found.title, found.rows);
        }
      } else if (event.key === "+" || event.key === "-") {
        const { min, max } = plot.scales.x, middle = this.at === undefined ? (min + max) / 2 : xs[this.at];
        const half = (max - min) * (event.key === "+" ? 0.25 : 1);
        plot.setScale("x", { min: Math.max(xs[0], middle - half), max: Math.min(xs[last], middle + half) });
      } else if (event.key === "Escape" || event.key === "0") {
        plot.setScale("x", { min: xs[0], max: xs[last] });
        hideTip();
      } else return;
      event.preventDefault();
    }
  }

  class LinesPanel extends UPlotPanel {
    /* uPlot wants one x for all series: undefined bridges another series' x, null is a gap of our own. */
    prepare() {
      const xs = [...new Set(this.panel.series.flatMap(series => series.x))].sort((a, b) => a - b);
      const place = new Map(xs.map((x, i) => [x, i]));
      const columns = [xs];
      for (const series of this.panel.series) {
        for (const key of series.low ? ["low", "high", "y"] : ["y"]) {
          const column = new Array(xs.length);
          series.x.forEach((x, i) => { column[place.get(x)] = series[key][i]; });
          columns.push(column);
        }
      }
      this.data = columns;
    }

    options() {
      const series = [{}], bands = [], paths = this.panel.stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
      for (const line of this.panel.series) {
        const show = !this.hidden.has(line.name), colour = colourOf(line.colour);
        if (line.low) {
          const [r, g, b] = rgb(colour);
          bands.push({ series: [series.length + 1, series.length], fill: `rgba(${r},${g},${b},0.18)` });
          for (let i = 0; i < 2; i++) series.push({ show, paths, stroke: "transparent", width: 0, points: { show: false } });
        }
        series.push({ show, paths, label: line.name, stroke: colour, width: 2, dash: dashOf(line), points: { show: line.x.length <= 12, size: 7, fill: colour } });
      }
      const y = this.panel.percent ? { range: (u, low, high) => low === null ? [0, 1] : [Math.max(0, low - (high - low) * 0.08), Math.min(Math.max(1, high), high + (high - low || 0.1) * 0.08)] } : {};
      const x = { time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high] };
      return { series, bands, scales: { x, y } };
    }

    near(plot, left) {
      const x = plot.posToVal(left, "x"), xs = plot.data[0];
      const at = plot.valToIdx(x), rows = [];
      for (const line of this.panel.series) {
        if (this.hidden.has(line.name)) continue;
        let best = -1;
        line.x.forEach((own, i) => {
          const usable = this.panel.stepped ? own <= xs[at] : line.y[i] !== null;
          if (usable && (best < 0 || Math.abs(own - xs[at]) <= Math.abs(line.x[best] - xs[at]))) best = i;
        });
        if (best < 0) continue;
        const spread = line.low ? ` ± ${shown(line.high[best] - line.y[best], this.panel.percent)}` : "";
        rows.push([line.name, shown(line.y[best], this.panel.percent) + spread, colourOf(line.colour)]);
      }
      return rows.length ? { title: `${this.panel.x_label} ${shown(xs[at], this.panel.x_percent)}`, rows } : null;
    }

    table() {
      const kept = thinned(this.data[0].length, 40), names = this.panel.series.map(series => series.name);
      const columns = this.panel.series.map(series => new Map(series.x.map((x, i) => [x, series.y[i]])));
      return [[this.panel.x_label, ...names], ...kept.map(i => [shown(this.data[0][i], this.panel.x_percent), ...columns.map(column => shown(column.get(this.data[0][i]), this.panel.percent))])];
    }
  }

  class ScatterPanel extends UPlotPanel {
    prepare() {
      const points = this.panel.series.flatMap((series, s) => series.x.map((x, i) => [x, series.y[i], s, series.weight ? series.weight[i] : 0.85]));
      points.sort((a, b) => a[0] - b[0]);
      this.points = points;
      this.data = [points.map(p => p[0]), ...this.panel.series.map((_, s) => points.map(p => p[2] === s ? p[1] : null))];
    }

    options() {
      const paths = (plot, at) => { this.dots(plot, at - 1); return null; };
      const series = [{}, ...this.panel.series.map(cloud => ({ show: !this.hidden.has(cloud.name), label: cloud.name, stroke: colourOf(cloud.colour), paths, points: { show: false } }))];
      const padded = (u, low, high) => low === null ? [0, 1] : [low - (high - low || 1) * 0.05, high + (high - low || 1) * 0.05];
      return {
        series,
        scales: { x: { time: false, range: padded }, y: { range: padded } },
        cursor: { drag: { x: true, y: true, dist: 6, uni: 40 }, x: false, y: false, points: { show: false } },
      };
    }

    dots(plot, s) {
      const context = plot.ctx, { left, top, width, height } = plot.bbox, cloud = this.panel.series[s];
      context.save();
      context.beginPath();
      context.rect(left, top, width, height);
      context.clip();
      context.fillStyle = colourOf(cloud.colour);
      const size = 2.6 * devicePixelRatio, variant = variantOf(cloud.colour);
      for (const [x, y, own, weight] of this.points) {
        if (own !== s) continue;
        context.globalAlpha = weight;
        marker(context, variant, plot.valToPos(x, "x", true), plot.valToPos(y, "y", true), size);
      }
      context.restore();
    }

    near(plot, left, top) {
      let best = null, closest = 18 ** 2;
      const keyboard = top === null, target = keyboard ? this.points[this.at] : null;
      for (const point of keyboard ? [target] : this.points) {
        if (!point || this.hidden.has(this.panel.series[point[2]].name)) continue;
        const far = keyboard ? 0 : (plot.valToPos(point[0], "x") - left) ** 2 + (plot.valToPos(point[1], "y") - top) ** 2;
        if (far < closest) { closest = far; best = point; }
      }
      if (!best) return null;
      const series = this.panel.series[best[2]];
      const rows = this.panel.bare ? [] : [[this.panel.x_label, shown(best[0])], [this.panel.y_label, shown(best[1])]];
      return { title: series.name, rows };
    }

    table() {
      const mean = values => shown(values.reduce((a, b) => a + b, 0) / values.length);
      return [["points of", "number", `mean ${this.panel.x_label || "x"}`, `mean ${this.panel.y_label || "y"}`], ...this.panel.series.map(s => [s.name, String(s.x.length), mean(s.x), mean(s.y)])];
    }
  }

  // ---------------------------------------------------------------- bars, as SVG

  class BarsPanel {
    constructor(host, panel, hidden) {
      Object.assign(this, { host, panel, hidden });
      this.at = -1;
      host.addEventListener("keydown", event => this.key(event));
      host.addEventListener("mouseleave", hideTip);
      host.addEventListener("blur", hideTip);
    }

    update(panel) { this.panel = panel; this.draw(); }
    toggle() { this.draw(); }
    resize() { if (this.width !== this.host.clientWidth) this.draw(); }

    draw() {
      const { categories, percent, y_label } = this.panel, series = this.panel.series.filter(s => !this.hidden.has(s.name));
      const width = this.width = Math.max(240, this.host.clientWidth), height = PANEL_HEIGHT;
      const values = series.flatMap(s => [...s.values, ...(s.low || []), ...(s.high || [])]).filter(v => v !== null);
      const low = Math.min(0, ...values), high = Math.max(0, ...values, low + 1e-9);
      const ticks = niceTicks(low, high * 1.04, 6), left = 30 + 7 * Math.max(3, ...ticks.map(t => this.tick(t).length)), bottom = height - 44, top = 12;
      const y = value => bottom - (value - low) / (Math.max(high * 1.04, ticks[ticks.length - 1]) - low) * (bottom - top);
      const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      for (const tick of ticks) {
        drawing.append(svg("line", { x1: left, x2: width - 8, y1: y(tick), y2: y(tick), class: tick === 0 ? "zero" : "grid" }));
        drawing.append(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, this.tick(tick)));
      }
      drawing.append(svg("text", { x: 12, y: (top + bottom) / 2, transform: `rotate(-90 12 ${(top + bottom) / 2})`, "text-anchor": "middle" }, y_label));
      const slot = (width - left - 8) / categories.length, each = Math.min(46, slot * 0.8 / Math.max(1, series.length));
      const every = Math.ceil(Math.max(...categories.map(c => c.length)) * 7.5 / slot);
      categories.forEach((category, c) => {
        const middle = left + slot * (c + 0.5);
        if (c % every === 0) drawing.append(svg("text", { x: middle, y: bottom + 18, "text-anchor": "middle" }, category));
        series.forEach((bar, s) => {
          const value = bar.values[c];
          if (value === null) return;
          const x = middle + (s - series.length / 2) * each;
          drawing.append(svg("rect", { x, width: Math.max(1, each * 0.9), y: Math.min(y(0), y(value)), height: Math.max(0.5, Math.abs(y(value) - y(0))), fill: colourOf(bar.colour), class: "bar" }));
          if (bar.low && bar.low[c] !== null && bar.high[c] > bar.low[c]) {
            const centre = x + each * 0.45;
            drawing.append(svg("line", { x1: centre, x2: centre, y1: y(bar.low[c]), y2: y(bar.high[c]), class: "whisker" }));
          }
        });
        const hit = svg("rect", { x: left + slot * c, y: top, width: slot, height: bottom - top, class: "hit" });
        hit.addEventListener("mousemove", event => showTip(category, this.rows(c), event.clientX, event.clientY));
        drawing.append(hit);
      });
      this.host.replaceChildren(drawing);
    }

    tick(value) { return this.panel.percent ? `${+(100 * value).toFixed(1)} %` : shown(value); }

    rows(c) {
      return this.panel.series.filter(s => !this.hidden.has(s.name)).map(s => {
        const spread = s.low && s.low[c] !== null && s.high[c] > s.low[c] ? ` (${shown(s.low[c], this.panel.percent)} to ${shown(s.high[c], this.panel.percent)})` : "";
        return [s.name, shown(s.values[c], this.panel.percent) + spread, colourOf(s.colour)];
      });
    }

    key(event) {
      const last = this.panel.categories.length - 1;
      const moves = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: last };
      if (event.key === "Escape") return hideTip();
      if (!(event.key in moves)) return;
      this.at = clamp(moves[event.key], 0, last);
      const box = this.host.querySelectorAll(".hit")[this.at].getBoundingClientRect();
      showTip(this.panel.categories[this.at], this.rows(this.at), box.left + box.width / 2, box.top + box.height / 2);
      announce(this.panel.categories[this.at], this.rows(this.at));
      event.preventDefault();
    }

    table() {
      return [["", ...this.panel.series.map(s => s.name)], ...this.panel.categories.map((category, c) => [category, ...this.panel.series.map(s => shown(s.values[c], this.panel.percent))])];
    }
  }

  // ---------------------------------------------------------------- cells on a canvas: heat maps and bubbles

  class CellsPanel {
    constructor(host, panel) {
      Object.assign(this, { host, panel });
      this.frame = 0;
      this.from = 0;
      this.to = panel.columns.length;
      this.canvas = el("canvas", { "aria-hidden": "true" });
      host.append(this.canvas);
      this.canvas.addEventListener("mousemove", event => this.hover(event));
      this.canvas.addEventListener("mouseleave", () => { this.over = null; hideTip(); if (!this.drag) this.paint(); });
      this.canvas.addEventListener("mousedown", event => { const cell = this.cell(event); this.drag = cell && { from: cell.column, to: cell.column }; });
      addEventListener("mouseup", () => this.drop());
      this.canvas.addEventListener("dblclick", () => this.range(0, this.panel.columns.length));
      host.addEventListener("keydown", event => this.key(event));
      host.addEventListener("blur", () => { this.over = null; hideTip(); this.paint(); });
    }

    update(panel) {
      const whole = this.from === 0 && this.to === this.panel.columns.length;
      this.panel = panel;
      this.decoded = null;
      if (whole || this.to > panel.columns.length) { this.from = 0; this.to = panel.columns.length; }
      this.draw();
    }

    toggle() {}
    resize() { if (this.width !== this.host.clientWidth) this.draw(); }
    choose(name) { const at = this.panel.frames.findIndex(frame => frame.name === name); if (at >= 0 && at !== this.frame) { this.frame = at; this.over = null; this.draw(); } }
    range(from, to) { this.from = from; this.to = to; this.over = null; this.draw(); }

    draw() {
      this.frame = Math.min(this.frame, this.panel.frames.length - 1);
      this.width = Math.max(240, this.host.clientWidth);
      const context = this.context = this.canvas.getContext("2d");
      context.font = FONT;
      const rows = this.rowNames(), columns = this.panel.columns;
      const longest = Math.max(...rows.map(name => context.measureText(this.short(name)).width));
      this.left = Math.ceil(longest) + 30;
      this.top = this.headroom();
      this.high = clamp(Math.floor(300 / rows.length), this.least(), 26);
      this.gap = this.panel.framed ? 7 : 0;
      const widestLabel = Math.max(...columns.map(name => context.measureText(this.short(name)).width)) + 10;
      this.wide = (this.width - this.left - 10) / (this.to - this.from);
      this.slanted = this.panel.framed && widestLabel > this.wide;
      this.every = this.slanted ? Math.ceil(14 / this.wide) : Math.max(1, Math.ceil(widestLabel / this.wide));
      const bottom = this.slanted ? widestLabel * 0.75 + 34 : 40;
      this.height = this.top + rows.length * this.high + 2 * this.gap + bottom;
      this.canvas.width = Math.round(this.width * devicePixelRatio);
      this.canvas.height = Math.round(this.height * devicePixelRatio);
      this.canvas.style.width = `${this.width}px`;
      this.canvas.style.height = `${this.height}px`;
      this.paint();
    }

    short(name) { return name.length > 18 ? `${name.slice(0, 17)}…` : name; }
    x(column) { return this.left + (column - this.from) * this.wide; }
    y(row) { return this.top + row * this.high + (row > 0 ? this.gap : 0) + (this.panel.framed && row === this.rowNames().length - 1 ? this.gap : 0); }

    paint() {
      const context = this.context, rows = this.rowNames(), columns = this.panel.columns;
      context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      context.clearRect(0, 0, this.width, this.height);
      context.font = FONT;
      this.cells(context, rows, columns);
      context.fillStyle = css("--muted");
      context.textBaseline = "middle";
      context.textAlign = "right";
      const each = Math.ceil(13 / this.high);
      rows.forEach((name, r) => { if (r % each === 0 || (this.panel.framed && r === rows.length - 1)) if (!(this.panel.framed && each > 1 && r > rows.length - 1 - each && r < rows.length - 1)) context.fillText(this.short(name), this.left - 7, this.y(r) + this.high / 2); });
      const below = this.y(rows.length - 1) + this.high + 6;
      for (let c = this.from; c < this.to; c++) {
        if ((c - this.from) % this.every) continue;
        context.save();
        context.translate(this.x(c) + this.wide / 2, below);
        if (this.slanted) { context.rotate(-Math.PI / 4); context.textAlign = "right"; context.textBaseline = "middle"; } else { context.textAlign = "center"; context.textBaseline = "top"; }
        context.fillText(this.short(columns[c]), 0, this.slanted ? 4 : 0);
        context.restore();
      }
      context.textAlign = "center";
      context.textBaseline = "bottom";
      context.fillText(this.panel.x_label, (this.left + this.width - 10) / 2, this.height - 4);
      context.save();
      context.translate(12, this.top + rows.length * this.high / 2);
      context.rotate(-Math.PI / 2);
      context.textBaseline = "middle";
      context.fillText(this.panel.y_label, 0, 0);
      context.restore();
      context.strokeStyle = css("--text");
      context.lineWidth = 2;
      if (this.over) context.strokeRect(this.x(this.over.column), this.y(this.over.row), this.wide, this.high);
      if (this.drag && this.drag.from !== this.drag.to) {
        const [from, to] = [Math.min(this.drag.from, this.drag.to), Math.max(this.drag.from, this.drag.to)];
        context.strokeRect(this.x(from), this.top, (to - from + 1) * this.wide, this.y(rows.length - 1) + this.high - this.top);
      }
    }

    cell(event) {
      const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      const column = this.from + Math.floor((x - this.left) / this.wide);
      const row = this.rowNames().findIndex((_, r) => y >= this.y(r) && y < this.y(r) + this.high);
      return row < 0 || column < this.from || column >= this.to ? null : { row, column };
    }

    hover(event) {
      const cell = this.cell(event);
      if (this.drag && cell) this.drag.to = cell.column;
      this.over = cell;
      this.paint();
      if (!cell) return hideTip();
      showTip(...this.told(cell), event.clientX, event.clientY);
    }

    drop() {
      if (!this.drag) return;
      const from = Math.min(this.drag.from, this.drag.to), to = Math.max(this.drag.from, this.drag.to) + 1;
      this.drag = null;
      if (to - from > 1) this.range(from, to);
    }

    key(event) {
      const rows = this.rowNames().length, at = this.over || { row: 0, column: this.from - 1 };
      const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
      const span = this.to - this.from, total = this.panel.columns.length;
      if (event.key in moves) {
        const [down, right] = moves[event.key];
        this.over = { row: clamp(at.row + down, 0, rows - 1), column: clamp(at.column + right, this.from, this.to - 1) };
        this.paint();
        const box = this.canvas.getBoundingClientRect();
        showTip(...this.told(this.over), box.left + this.x(this.over.column) + this.wide, box.top + this.y(this.over.row));
        announce(...this.told(this.over));
      } else if (event.key === "+" && span > 4) {
        const middle = this.over ? this.over.column : this.from + span / 2;
        const from = clamp(Math.round(middle - span / 4), 0, total - Math.ceil(span / 2));
        this.range(from, from + Math.ceil(span / 2));
      } else if (event.key === "-") {
        const from = Math.max(0, Math.round(this.from - span / 2));
        this.range(from, Math.min(total, from + 2 * span));
      } else if (event.key === "Escape" || event.key === "0") {
        this.range(0, total);
        hideTip();
      } else return;
      event.preventDefault();
    }
  }

  class GridPanel extends CellsPanel {
    rowNames() { return this.panel.frames[this.frame].rows; }
    headroom() { return 8; }
    least() { return this.rowNames().length > 60 ? 5 : 9; }

    values() {
      if (!this.decoded) this.decoded = new Map();
      if (!this.decoded.has(this.frame)) {
        const frame = this.panel.frames[this.frame];
        this.decoded.set(this.frame, { cells: bytes(frame.cells), marked: frame.marked && bytes(frame.marked) });
      }
      return this.decoded.get(this.frame);
    }

    share(row, column) {
      const value = this.values().cells[row * this.panel.columns.length + column];
      return value === GRID_MISSING ? null : value / GRID_STEPS;
    }

    cells(context, rows, columns) {
      const { marked } = this.values(), line = this.wide > 6 ? 0.5 : 0;
      for (let r = 0; r < rows.length; r++) {
        for (let c = this.from; c < this.to; c++) {
          const share = this.share(r, c);
          context.fillStyle = share === null ? css("--grid") : `rgb(${ramp(share).join(",")})`;
          context.fillRect(this.x(c) + line, this.y(r) + line, this.wide - 2 * line + (line ? 0 : 0.5), this.high - (this.high > 6 ? 1 : 0));
          if (marked && marked[r * columns.length + c] && this.wide > 5) {
            context.fillStyle = css("--dot");
            context.beginPath();
            context.arc(this.x(c) + this.wide / 2, this.y(r) + this.high / 2, clamp(this.high / 6, 1.2, 3), 0, 2 * Math.PI);
            context.fill();
          }
        }
      }
    }

    told({ row, column }) {
      const framed = this.panel.framed, name = this.rowNames()[row], other = this.panel.columns[column];
      const { marked } = this.values(), held = marked && marked[row * this.panel.columns.length + column];
      const rows = [[framed ? `class ${other}` : `${this.panel.y_label} ${name}`, shown(this.share(row, column), true)]];
      if (framed && row > 0 && row < this.rowNames().length - 1) rows.push(["held by the client", held ? "yes" : "no"]);
      return [framed ? name : `${this.panel.x_label} ${other}`, rows];
    }

    table() {
      const kept = thinned(this.panel.columns.length, 30), rows = this.rowNames();
      return [[`${this.panel.y_label} \\ ${this.panel.x_label}`, ...kept.map(c => this.panel.columns[c])], ...rows.map((name, r) => [name, ...kept.map(c => shown(this.share(r, c), true))])];
    }

    scale() {
      const bar = el("canvas", { width: 160, height: 10, "aria-hidden": "true" }), context = bar.getContext("2d");
      for (let x = 0; x < 160; x++) { context.fillStyle = `rgb(${ramp(x / 159).join(",")})`; context.fillRect(x, 0, 1, 10); }
      return el("div", { class: "scale" }, "0 %", bar, "100 % accuracy", ...(this.panel.frames.some(f => f.marked) ? [" · dot: the client holds the class"] : []));
    }
  }

  class BubblesPanel extends CellsPanel {
    rowNames() { return this.panel.rows; }
    headroom() { return this.panel.domains.length ? 20 : 8; }
    least() { return this.panel.rows.length > 40 ? 6 : 18; }
    count(row, column) { return this.panel.frames[this.frame].counts[column][row]; }
    most() { return Math.max(1, ...this.panel.frames.map(frame => Math.max(...frame.counts.map(row => Math.max(...row))))); }
    radius(count) { return Math.sqrt(count / this.most()) * Math.max(3.5, Math.min(this.high, this.wide * 1.6) / 2); }
    domainNames() { return [...new Set(this.panel.domains)]; }

    cells(context, rows, columns) {
      context.strokeStyle = css("--grid");
      context.lineWidth = 1;
      for (let r = 0; r < rows.length; r++) {
        context.beginPath();
        context.moveTo(this.left, this.y(r) + this.high / 2);
        context.lineTo(this.width - 10, this.y(r) + this.high / 2);
        context.stroke();
      }
      const names = this.domainNames();
      for (let c = this.from; c < this.to; c++) {
        const domain = names.indexOf(this.panel.domains[c]);
        context.fillStyle = colourOf(Math.max(0, domain));
        if (domain >= 0) context.fillRect(this.x(c) + 0.5, 4, this.wide - 1, 8);
        context.globalAlpha = 0.8;
        for (let r = 0; r < rows.length; r++) {
          const count = this.count(r, c);
          if (!count) continue;
          context.beginPath();
          context.arc(this.x(c) + this.wide / 2, this.y(r) + this.high / 2, Math.max(0.8, this.radius(count)), 0, 2 * Math.PI);
          context.fill();
        }
        context.globalAlpha = 1;
      }
    }

    told({ row, column }) {
      const domain = this.panel.domains[column];
      const rows = [[`class ${this.panel.rows[row]}`, `${shown(this.count(row, column))} samples`]];
      if (domain) rows.push(["domain", domain]);
      return [`client ${this.panel.columns[column]}`, rows];
    }

    table() {
      return [["client", ...this.panel.rows], ...this.panel.columns.map((name, c) => [name, ...this.panel.rows.map((_, r) => shown(this.count(r, c)))])];
    }

    scale() {
      const most = this.most(), sizes = [0.05, 0.3, 1].map(share => Math.max(1, +(most * share).toPrecision(1)));
      const entries = sizes.map(size => {
        const radius = Math.max(1, this.radius(size)), box = 2 * radius + 2;
        return el("span", {}, svg("svg", { width: box, height: box, "aria-hidden": "true" }, svg("circle", { cx: box / 2, cy: box / 2, r: radius, fill: colourOf(0), opacity: 0.8 })), ` ${shown(size)}`);
      });
      const domains = this.domainNames().map((name, i) => {
        const swatch = el("i", { class: "swatch" });
        swatch.style.background = colourOf(i);
        return el("span", {}, swatch, ` ${name}`);
      });
      return el("div", { class: "scale" }, "samples: ", ...entries, ...domains);
    }
  }

  const KINDS = { lines: LinesPanel, scatter: ScatterPanel, bars: BarsPanel, grid: GridPanel, bubbles: BubblesPanel };

  // ---------------------------------------------------------------- a figure: legend, slider, panels, words

  class FigureView {
    constructor(figure) {
      this.figure = figure;
      this.hidden = new Set();
      this.section = el("section", { class: "figure", id: `figure-${figure.name}`, "data-figure": figure.name, tabindex: "-1", "aria-labelledby": `title-${figure.name}` });
      this.build();
    }

    build() {
      const { name, title, reading, source, panels } = this.figure;
      const names = panel => (panel.series || []).map(s => s.name).join("\n"), first = panels.map(names)[0];
      this.shared = panel => first !== "" && panels.filter(p => names(p) === first).length > 1 && names(panel) === first;
      this.views = panels.map(panel => {
        const host = el("div", { class: `plot ${panel.kind}`, tabindex: "0", role: "img", "data-kind": panel.kind });
        const view = new KINDS[panel.kind](host, panel, this.hidden);
        const key = el("div", { class: "key" });
        const wide = panel.kind === "bubbles" || (panel.kind === "bars" && panel.categories.length > 12) || (panel.kind === "grid" && panels.length === 1);
        return { view, host, key, box: el("div", { class: wide ? "panel wide" : "panel" }, ...(panel.title ? [el("h3", {}, panel.title)] : []), host, key) };
      });
      this.legend = el("div", { class: "key common" });
      this.summary = el("p", { class: "summary" });
      this.numbers = el("details", { class: "numbers" }, el("summary", {}, "The numbers"));
      this.numbers.addEventListener("toggle", () => this.tables());
      this.section.replaceChildren(
        el("h2", { id: `title-${name}` }, title),
        el("p", { class: "reading" }, reading, " ", el("span", { class: "source" }, `As in ${source}.`)),
        this.slider(), this.legend,
        el("div", { class: panels.length % 3 ? "panels" : "panels thirds" }, ...this.views.map(v => v.box)),
        this.summary, this.numbers);
      this.shape = this.outline(this.figure);
    }

    outline(figure) { return figure.panels.map(p => p.kind + p.title + (p.series || []).map(s => s.name).join("\n")).join("\n\n"); }

    slider() {
      const names = [...new Set(this.figure.panels.flatMap(p => (p.frames || []).map(f => f.name)))];
      names.sort((a, b) => parseInt(a.replace(/\D/g, ""), 10) - parseInt(b.replace(/\D/g, ""), 10));
      this.names = names;
      if (names.length < 2) return "";
      const label = el("output", {}, ""), input = el("input", { type: "range", min: 0, max: names.length - 1, step: 1, "aria-label": `Choose what to show, ${names[0]} to ${names[names.length - 1]}` });
      this.setFrame = at => {
        input.value = at;
        label.textContent = names[at];
        input.setAttribute("aria-valuetext", names[at]);
        this.frameName = names[at];
        for (const { view } of this.views) if (view.choose) view.choose(names[at]);
        if (this.numbers && this.numbers.open) this.tables();
      };
      input.addEventListener("input", () => this.setFrame(Number(input.value)));
      this.startFrame = this.frameName && names.includes(this.frameName) ? names.indexOf(this.frameName) : this.figure.name === "strip" ? names.length - 1 : 0;
      return el("div", { class: "slider" }, input, label);
    }

    draw() {
      for (const { view } of this.views) view.draw();
      if (this.names.length > 1) this.setFrame(this.startFrame);
      this.words();
    }

    words() {
      this.summary.textContent = this.figure.summary;
      this.views.forEach(({ host, view, key }) => {
        host.setAttribute("aria-label", `${view.panel.title || this.figure.title}. ${this.figure.summary} Arrow keys read the values, plus and minus zoom, Escape resets.`);
        if (view.scale) key.replaceChildren(view.scale());
        else if (!this.shared(view.panel)) key.replaceChildren(...this.buttons(view.panel));
      });
      const first = this.views[0].view.panel;
      this.legend.replaceChildren(...(this.shared(first) ? this.buttons(first) : []));
    }

    buttons(panel) {
      if (panel.series.length < 2) return panel.series.length && panel.kind === "lines" ? [this.swatch(panel, panel.series[0])] : [];
      return panel.series.map(series => {
        const button = el("button", { type: "button", "aria-pressed": String(!this.hidden.has(series.name)), title: "Show or hide" }, this.symbol(panel, series), series.name);
        button.addEventListener("click", () => {
          if (!this.hidden.delete(series.name)) this.hidden.add(series.name);
          button.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
          for (const { view } of this.views) view.toggle();
        });
        return button;
      });
    }

    swatch(panel, series) { return el("span", { class: "only" }, this.symbol(panel, series), series.name); }

    symbol(panel, series) {
      const colour = colourOf(series.colour), drawing = svg("svg", { width: 26, height: 12, "aria-hidden": "true" });
      if (panel.kind === "lines") drawing.append(svg("line", { x1: 1, x2: 25, y1: 6, y2: 6, stroke: colour, "stroke-width": 3, "stroke-dasharray": dashOf(series).join(" ") }));
      else if (panel.kind === "scatter") {
        const shapes = [() => svg("circle", { cx: 13, cy: 6, r: 4.5, fill: colour }), () => svg("rect", { x: 9, y: 2, width: 8, height: 8, fill: colour }), () => svg("path", { d: "M13 1 L18 11 L8 11 Z", fill: colour }), () => svg("path", { d: "M13 0 L19 6 L13 12 L7 6 Z", fill: colour })];
        drawing.append(shapes[variantOf(series.colour)]());
      } else drawing.append(svg("rect", { x: 4, y: 1, width: 18, height: 10, fill: colour }));
      return drawing;
    }

    tables() {
      if (!this.numbers.open) return;
      const tables = this.views.map(({ view }) => {
        const [head, ...rows] = view.table();
        const table = el("table", {}, el("caption", {}, view.panel.title || this.figure.title),
          el("thead", {}, el("tr", {}, ...head.map(cell => el("th", { scope: "col" }, cell)))),
          el("tbody", {}, ...rows.map(([first, ...cells]) => el("tr", {}, el("th", { scope: "row" }, first), ...cells.map(cell => el("td", {}, cell))))));
        return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": view.panel.title || this.figure.title }, table);
      });
      this.numbers.replaceChildren(this.numbers.firstElementChild, ...tables);
    }

    update(figure) {
      const same = this.outline(figure) === this.shape && figure.panels.every((p, i) => (p.frames || []).length < 2 && (this.figure.panels[i].frames || []).length < 2);
      this.figure = figure;
      if (!same) { this.build(); this.draw(); return; }
      figure.panels.forEach((panel, i) => this.views[i].view.update(panel));
      this.words();
      this.tables();
    }

    resize() { for (const { view } of this.views) view.resize(); }
  }

  // ---------------------------------------------------------------- the page

  function leaderboard(board, state) {
    const several = board.rows.some(row => row.p !== null);
    const keys = ["method", "seeds", ...board.columns.map(c => c.name), ...(several ? ["p"] : [])];
    const value = (row, k) => k === 0 ? row.label : k === 1 ? row.seeds : k - 2 < board.columns.length ? row.cells[k - 2].value : row.p;
    const order = board.rows.map((row, i) => ({ row, i }));
    if (state.sort !== undefined) {
      order.sort((a, b) => {
        const [x, y] = [value(a.row, state.sort), value(b.row, state.sort)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (x < y ? -1 : x > y ? 1 : 0) * (state.down ? -1 : 1);
      });
    }
    const head = keys.map((name, k) => {
      const sorted = state.sort === k ? (state.down ? "descending" : "ascending") : null;
      const button = el("button", { type: "button", title: k > 1 && k - 2 < board.columns.length ? board.columns[k - 2].help : null }, name, el("span", { "aria-hidden": "true" }, sorted ? (state.down ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => {
        state.down = state.sort === k ? !state.down : k > 1 && k - 2 < board.columns.length && board.columns[k - 2].better === "high";
        state.sort = k;
        state.redraw();
        state.host.querySelectorAll("thead button")[k].focus();
      });
      return el("th", { scope: "col", "aria-sort": sorted }, button);
    });
    const rows = order.map(({ row, i }) => {
      const swatch = el("i", { class: "swatch" });
      swatch.style.background = colourOf(row.colour);
      const cells = row.cells.map((cell, c) => el("td", { class: board.best[c] === i ? "best" : null }, cell.text));
      return el("tr", {}, el("th", { scope: "row" }, swatch, row.label), el("td", {}, String(row.seeds)), ...cells, ...(several ? [el("td", {}, row.p === null ? "–" : String(row.p))] : []));
    });
    return [
      el("h2", {}, "Leaderboard"),
      el("p", { class: "reading" }, "One row per method, the best of each column in bold; a column's head sorts by it. ", board.note),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Leaderboard" }, el("table", { class: "board" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
    ];
  }

  function listed(title, reading, head, rows) {
    if (!rows.length) return "";
    return el("section", {}, el("h2", {}, title), el("p", { class: "reading" }, reading),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, el("table", {},
        el("thead", {}, el("tr", {}, ...head.map(name => el("th", { scope: "col" }, name)))),
        el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map(cell => el("td", {}, cell))))))));
  }

  /* Goes to a section without touching the address, which the dashboard keeps its selection in. */
  function link(id, text) {
    return el("a", { href: `#${id}`, onclick: event => {
      event.preventDefault();
      const section = document.getElementById(id);
      section.scrollIntoView();
      section.focus({ preventScroll: true });
    } }, text);
  }

  function render(container, model) {
    palette = model.palette;
    const views = new Map();
    const board = el("section", { class: "figure", id: "leaderboard", tabindex: "-1" });
    const state = { host: board, redraw: () => board.replaceChildren(...leaderboard(model.leaderboard, state)) };
    const figures = el("div", { class: "figures" }), tail = el("div", {}), contents = el("nav", { class: "contents", "aria-label": "Figures" });
    container.replaceChildren(contents, board, figures, tail, tip, announcer);

    function fill(next, partial) {
      model = partial ? { ...model, ...next, figures: model.figures.map(old => next.figures.find(f => f.name === old.name) || old) } : next;
      palette = model.palette;
      state.redraw();
      const wanted = new Set(model.figures.map(f => f.name));
      for (const [name, view] of views) if (!wanted.has(name)) { view.section.remove(); views.delete(name); }
      for (const figure of partial ? next.figures : model.figures) {
        if (!wanted.has(figure.name)) continue;
        if (views.has(figure.name)) views.get(figure.name).update(figure);
        else {
          const view = new FigureView(figure);
          views.set(figure.name, view);
          figures.append(view.section);
          view.draw();
        }
      }
      if (partial) return;
      contents.replaceChildren(link("leaderboard", "Leaderboard"), ...model.figures.map(f => link(`figure-${f.name}`, f.title)));
      tail.replaceChildren(
        listed("Incidents", "What went wrong at a client and was left out of the round.", ["run", "round", "client", "kind", "detail"], model.incidents),
        listed("Runs", `What was run; everything needed to run it again is in each run's experiment.yaml. ${model.runs.common}`, model.runs.head, model.runs.rows),
        listed("Not shown", "Figures these runs did not record what is needed for.", ["figure", "why"], model.missing));
    }

    const redraw = () => { palette = model.palette; state.redraw(); for (const view of views.values()) { for (const { view: panel } of view.views) panel.draw(); view.words(); } };
    fill(model, false);
    let waiting = 0;
    const observer = new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { for (const view of views.values()) view.resize(); }); });
    observer.observe(container);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    document.addEventListener("holdfast-theme", redraw);
    return { update: next => fill(next, false), patch: next => fill(next, true), views };
  }

  function themeButton(button) {
    const kept = (() => { try { return localStorage.getItem("holdfast-theme"); } catch { return null; } })();
    const set = theme => {
      document.documentElement.dataset.theme = theme;
      button.textContent = theme === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
      try { localStorage.setItem("holdfast-theme", theme); } catch { /* a page from disk may have no storage */ }
      document.dispatchEvent(new Event("holdfast-theme"));
    };
    button.textContent = (kept || (isDark() ? "dark" : "light")) === "dark" ? "Light" : "Dark";
    if (kept) set(kept);
    button.addEventListener("click", () => set(isDark() ? "light" : "dark"));
  }

  return { render, themeButton, el, shown };
})();
