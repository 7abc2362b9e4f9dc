/* Panels drawn by uPlot: lines with bands, and scatter plots. */
"use strict";
{
  const {
    PANEL_HEIGHT,
    FONT,
    clamp,
    formatNumber,
    evenlySpaced,
    css,
    colourOf,
    variantOf,
    dashOf,
    rgb,
    marker,
    showTooltip,
    hideTooltip,
    announce,
  } = Holdfast;

  function axis(label, values, hideAxes) {
    const grid = { stroke: css("--grid"), width: 1 };
    return {
      show: !hideAxes,
      label: label || undefined,
      labelSize: 20,
      labelGap: 0,
      labelFont: FONT,
      font: FONT,
      stroke: css("--muted"),
      size: 26,
      grid,
      ticks: { ...grid, size: 4 },
      gap: 4,
      ...(values ? { values } : {}),
    };
  }

  const WHOLE = [1, 2, 5]
    .flatMap(step => [0, 1, 2, 3, 4, 5].map(power => step * 10 ** power))
    .sort((a, b) => a - b);

  function percentTicks(plot, ticks) {
    const step = ticks.length > 1 ? 100 * Math.abs(ticks[1] - ticks[0]) : 1;
    const digits =
      [0, 1, 2, 3, 4].find(d => Math.abs(step * 10 ** d - Math.round(step * 10 ** d)) < 1e-6) ?? 5;
    return ticks.map(value => `${(100 * value).toFixed(digits)} %`);
  }

  /* Fractions are padded within 0 and 1; a flat curve is padded, too, since uPlot finds no ticks for an empty range. */
  function shareRange(plot, low, high) {
    if (low === null) return [0, 1];
    const room = 0.08 * (high - low) || 0.05;
    return [Math.max(0, low - room), Math.min(Math.max(1, high), high + room)];
  }

  class UPlotPanel {
    constructor(host, panel, hidden) {
      Object.assign(this, { host, panel, hidden });
      this.plot = null;
      host.addEventListener("keydown", event => this.onKey(event));
      host.addEventListener("mouseleave", hideTooltip);
      host.addEventListener("blur", hideTooltip);
    }

    /* Removes uPlot's listeners on the window. */
    close() {
      if (this.plot) this.plot.destroy();
    }

    update(panel) {
      const shape = of => of.series.map(series => [series.name, "low" in series]).join();
      const same = this.plot && shape(panel) === shape(this.panel);
      this.panel = panel;
      if (!same) return this.draw();
      this.prepare();
      this.plot.setData(this.data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
    }

    draw() {
      const zoom = this.zoomed && { min: this.plot.scales.x.min, max: this.plot.scales.x.max };
      this.close();
      this.prepare();
      const width = Math.max(240, this.host.clientWidth);
      const { x_label, y_label, percent, x_percent, hide_axes } = this.panel;
      const options = {
        width,
        height: PANEL_HEIGHT,
        pxAlign: 0,
        padding: [10, 14, 0, 0],
        legend: { show: false },
        axes: [
          {
            ...axis(x_label, x_percent ? percentTicks : null, hide_axes),
            ...(this.wholeNumbers() ? { incrs: WHOLE } : {}),
          },
          {
            ...axis(y_label, percent ? percentTicks : null, hide_axes),
            size: (u, values) => 16 + 7 * Math.max(2, ...(values || [""]).map(v => String(v).length)),
          },
        ],
        cursor: { drag: { x: true, y: false, dist: 6 }, y: false, points: { size: 7 } },
        hooks: {
          setCursor: [plot => this.hover(plot)],
          setScale: [
            (plot, key) => {
              if (key === "x") this.scaled(plot);
            },
          ],
        },
        ...this.options(),
      };
      this.plot = new uPlot(options, this.data, this.host);
      this.plot.over.setAttribute("aria-hidden", "true");
      if (zoom) this.plot.setScale("x", zoom);
    }

    /* Rounds and stages are whole numbers, and so are their ticks. */
    wholeNumbers() {
      return this.panel.kind === "lines" && this.data[0].every(Number.isInteger);
    }

    scaled(plot) {
      const xs = plot.data[0],
        { min, max } = plot.scales.x;
      this.zoomed = xs.length > 1 && (min > xs[0] || max < xs[xs.length - 1]);
    }

    resize() {
      if (this.plot && this.host.clientWidth > 0 && this.plot.width !== this.host.clientWidth)
        this.plot.setSize({ width: Math.max(240, this.host.clientWidth), height: PANEL_HEIGHT });
    }

    toggle() {
      this.draw();
    }

    hover(plot) {
      const { left, top, event } = plot.cursor;
      if (left < 0 || !event) return hideTooltip();
      const found = this.valuesAt(plot, left, top);
      if (!found) return hideTooltip();
      showTooltip(found.title, found.rows, event.clientX, event.clientY);
    }

    onKey(event) {
      const plot = this.plot,
        xs = plot.data[0];
      const last = xs.length - 1,
        at = this.selected ?? -1;
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last };
      if (event.key in moves) {
        this.selected = clamp(moves[event.key], 0, last);
        const left = plot.valToPos(xs[this.selected], "x"),
          found = this.valuesAt(plot, left, null);
        if (left < 0 || left > plot.over.clientWidth) plot.setScale("x", { min: xs[0], max: xs[last] });
        plot.setCursor({ left, top: plot.over.clientHeight / 2 }, false);
        if (found) {
          const box = plot.over.getBoundingClientRect();
          showTooltip(found.title, found.rows, box.left + left, box.top + box.height / 2);
          announce(found.title, found.rows);
        }
      } else if (event.key === "+" || event.key === "-") {
        const { min, max } = plot.scales.x,
          middle = this.selected === undefined ? (min + max) / 2 : xs[this.selected];
        const half = (max - min) * (event.key === "+" ? 0.25 : 1);
        plot.setScale("x", { min: Math.max(xs[0], middle - half), max: Math.min(xs[last], middle + half) });
      } else if (event.key === "Escape" || event.key === "0") {
        plot.setScale("x", { min: xs[0], max: xs[last] });
        hideTooltip();
      } else return;
      event.preventDefault();
    }
  }

  class LinesPanel extends UPlotPanel {
    /* uPlot takes one x for all series: undefined is connected across, null is a gap. */
    prepare() {
      const xs = [...new Set(this.panel.series.flatMap(series => series.x))].sort((a, b) => a - b);
      const place = new Map(xs.map((x, i) => [x, i]));
      const columns = [xs];
      for (const series of this.panel.series) {
        for (const key of series.low ? ["low", "high", "y"] : ["y"]) {
          const column = new Array(xs.length);
          series.x.forEach((x, i) => {
            column[place.get(x)] = series[key][i];
          });
          columns.push(column);
        }
      }
      this.data = columns;
    }

    options() {
      const series = [{}],
        bands = [],
        paths = this.panel.stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
      for (const line of this.panel.series) {
        const show = !this.hidden.has(line.name),
          colour = colourOf(line.colour);
        if (line.low) {
          const [r, g, b] = rgb(colour);
          bands.push({ series: [series.length + 1, series.length], fill: `rgba(${r},${g},${b},0.18)` });
          for (let i = 0; i < 2; i++)
            series.push({ show, paths, stroke: "transparent", width: 0, points: { show: false } });
        }
        series.push({
          show,
          paths,
          label: line.name,
          stroke: colour,
          width: 2,
          dash: dashOf(line),
          points: { show: line.x.length <= 12, size: 7, fill: colour },
        });
      }
      const y = this.panel.percent ? { range: shareRange } : {};
      const x = { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) };
      return { series, bands, scales: { x, y } };
    }

    valuesAt(plot, left) {
      const x = plot.posToVal(left, "x"),
        xs = plot.data[0];
      const at = plot.valToIdx(x),
        rows = [];
      for (const line of this.panel.series) {
        if (this.hidden.has(line.name)) continue;
        let best = -1;
        line.x.forEach((own, i) => {
          const usable = this.panel.stepped ? own <= xs[at] : line.y[i] !== null;
          if (usable && (best < 0 || Math.abs(own - xs[at]) <= Math.abs(line.x[best] - xs[at]))) best = i;
        });
        if (best < 0) continue;
        const own = line.x[best],
          elsewhere = !this.panel.stepped && own !== xs[at];
        if (elsewhere && (xs[at] < line.x[0] || xs[at] > line.x[line.x.length - 1])) continue; // outside of the curve
        const name = elsewhere ? `${line.name} (${this.panel.x_label} ${formatNumber(own)})` : line.name;
        const spread = line.low
          ? ` ± ${formatNumber(line.high[best] - line.y[best], this.panel.percent)}`
          : "";
        rows.push([name, formatNumber(line.y[best], this.panel.percent) + spread, colourOf(line.colour)]);
      }
      return rows.length
        ? { title: `${this.panel.x_label} ${formatNumber(xs[at], this.panel.x_percent)}`, rows }
        : null;
    }

    table() {
      const kept = evenlySpaced(this.data[0].length, 40),
        names = this.panel.series.map(series => series.name);
      const columns = this.panel.series.map(series => new Map(series.x.map((x, i) => [x, series.y[i]])));
      return [
        [this.panel.x_label, ...names],
        ...kept.map(i => [
          formatNumber(this.data[0][i], this.panel.x_percent),
          ...columns.map(column => formatNumber(column.get(this.data[0][i]), this.panel.percent)),
        ]),
      ];
    }
  }

  class ScatterPanel extends UPlotPanel {
    prepare() {
      const points = this.panel.series.flatMap((series, s) =>
        series.x.map((x, i) => [x, series.y[i], s, series.opacity ? series.opacity[i] : 0.85]),
      );
      points.sort((a, b) => a[0] - b[0]);
      this.points = points;
      this.data = [
        points.map(p => p[0]),
        ...this.panel.series.map((_, s) => points.map(p => (p[2] === s ? p[1] : null))),
      ];
    }

    options() {
      const paths = (plot, at) => {
        this.dots(plot, at - 1);
        return null;
      };
      const series = [
        {},
        ...this.panel.series.map(points => ({
          show: !this.hidden.has(points.name),
          label: points.name,
          stroke: colourOf(points.colour),
          paths,
          points: { show: false },
        })),
      ];
      const padded = (u, low, high) =>
        low === null ? [0, 1] : [low - (high - low || 1) * 0.05, high + (high - low || 1) * 0.05];
      return {
        series,
        scales: { x: { time: false, range: padded }, y: { range: padded } },
        cursor: { drag: { x: true, y: true, dist: 6, uni: 40 }, x: false, y: false, points: { show: false } },
      };
    }

    dots(plot, s) {
      const context = plot.ctx,
        { left, top, width, height } = plot.bbox,
        points = this.panel.series[s];
      context.save();
      context.beginPath();
      context.rect(left, top, width, height);
      context.clip();
      context.fillStyle = colourOf(points.colour);
      const size = 2.6 * devicePixelRatio,
        variant = variantOf(points.colour);
      for (const [x, y, own, opacity] of this.points) {
        if (own !== s) continue;
        context.globalAlpha = opacity;
        marker(context, variant, plot.valToPos(x, "x", true), plot.valToPos(y, "y", true), size);
      }
      context.restore();
    }

    valuesAt(plot, left, top) {
      let best = null,
        closest = 18 ** 2;
      const keyboard = top === null,
        target = keyboard ? this.points[this.selected] : null;
      for (const point of keyboard ? [target] : this.points) {
        if (!point || this.hidden.has(this.panel.series[point[2]].name)) continue;
        const far = keyboard
          ? 0
          : (plot.valToPos(point[0], "x") - left) ** 2 + (plot.valToPos(point[1], "y") - top) ** 2;
        if (far < closest) {
          closest = far;
          best = point;
        }
      }
      if (!best) return null;
      const series = this.panel.series[best[2]];
      const rows = this.panel.hide_axes
        ? []
        : [
            [this.panel.x_label, formatNumber(best[0])],
            [this.panel.y_label, formatNumber(best[1])],
          ];
      return { title: series.name, rows };
    }

    table() {
      const mean = values => formatNumber(values.reduce((a, b) => a + b, 0) / values.length);
      return [
        ["points of", "number", `mean ${this.panel.x_label || "x"}`, `mean ${this.panel.y_label || "y"}`],
        ...this.panel.series.map(s => [s.name, String(s.x.length), mean(s.x), mean(s.y)]),
      ];
    }
  }

  Object.assign(Holdfast, { LinesPanel, ScatterPanel });
}
