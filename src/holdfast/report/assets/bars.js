/* Panels of bars, as SVG. */
"use strict";
{
  const { PANEL_HEIGHT, svg, clamp, formatNumber, colourOf, showTooltip, hideTooltip, announce } = Holdfast;

  function roundTicks(low, high, count) {
    const rough = (high - low || 1) / count,
      power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
      ticks.push(+(i * step).toPrecision(12));
    return ticks;
  }

  class BarsPanel {
    constructor(host, panel, hidden) {
      Object.assign(this, { host, panel, hidden });
      this.selected = -1;
      host.addEventListener("keydown", event => this.onKey(event));
      host.addEventListener("mouseleave", hideTooltip);
      host.addEventListener("blur", hideTooltip);
    }

    update(panel) {
      this.panel = panel;
      this.draw();
    }
    toggle() {
      this.draw();
    }
    resize() {
      if (this.width !== this.host.clientWidth) this.draw();
    }

    draw() {
      const { categories, percent, y_label } = this.panel,
        series = this.panel.series.filter(s => !this.hidden.has(s.name));
      const width = (this.width = Math.max(240, this.host.clientWidth)),
        height = PANEL_HEIGHT;
      const values = series
        .flatMap(s => [...s.values, ...(s.low || []), ...(s.high || [])])
        .filter(v => v !== null);
      const low = Math.min(0, ...values),
        high = Math.max(0, ...values, low + 1e-9);
      const ticks = roundTicks(low, high * 1.04, 6),
        left = 30 + 7 * Math.max(3, ...ticks.map(t => this.tickText(t).length)),
        bottom = height - 44,
        top = 12;
      const y = value =>
        bottom - ((value - low) / (Math.max(high * 1.04, ticks[ticks.length - 1]) - low)) * (bottom - top);
      const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      for (const tick of ticks) {
        drawing.append(
          svg("line", {
            x1: left,
            x2: width - 8,
            y1: y(tick),
            y2: y(tick),
            class: tick === 0 ? "zero" : "grid",
          }),
        );
        drawing.append(
          svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, this.tickText(tick)),
        );
      }
      drawing.append(
        svg(
          "text",
          {
            x: 12,
            y: (top + bottom) / 2,
            transform: `rotate(-90 12 ${(top + bottom) / 2})`,
            "text-anchor": "middle",
          },
          y_label,
        ),
      );
      const groupWidth = (width - left - 8) / categories.length,
        barWidth = Math.min(46, (groupWidth * 0.8) / Math.max(1, series.length));
      const every = Math.ceil((Math.max(...categories.map(c => c.length)) * 7.5) / groupWidth);
      categories.forEach((category, c) => {
        const middle = left + groupWidth * (c + 0.5);
        if (c % every === 0)
          drawing.append(svg("text", { x: middle, y: bottom + 18, "text-anchor": "middle" }, category));
        series.forEach((bar, s) => {
          const value = bar.values[c];
          if (value === null) return;
          const x = middle + (s - series.length / 2) * barWidth;
          drawing.append(
            svg("rect", {
              x,
              width: Math.max(1, barWidth * 0.9),
              y: Math.min(y(0), y(value)),
              height: Math.max(0.5, Math.abs(y(value) - y(0))),
              fill: colourOf(bar.colour),
              class: "bar",
            }),
          );
          if (bar.low && bar.low[c] !== null && bar.high[c] > bar.low[c]) {
            const centre = x + barWidth * 0.45;
            drawing.append(
              svg("line", {
                x1: centre,
                x2: centre,
                y1: y(bar.low[c]),
                y2: y(bar.high[c]),
                class: "whisker",
              }),
            );
          }
        });
        const hit = svg("rect", {
          x: left + groupWidth * c,
          y: top,
          width: groupWidth,
          height: bottom - top,
          class: "hit",
        });
        hit.addEventListener("mousemove", event =>
          showTooltip(category, this.valuesAt(c), event.clientX, event.clientY),
        );
        drawing.append(hit);
      });
      this.host.replaceChildren(drawing);
    }

    tickText(value) {
      return this.panel.percent ? `${+(100 * value).toFixed(1)} %` : formatNumber(value);
    }

    valuesAt(c) {
      return this.panel.series
        .filter(s => !this.hidden.has(s.name))
        .map(s => {
          const spread =
            s.low && s.low[c] !== null && s.high[c] > s.low[c]
              ? ` (${formatNumber(s.low[c], this.panel.percent)} to ${formatNumber(s.high[c], this.panel.percent)})`
              : "";
          return [s.name, formatNumber(s.values[c], this.panel.percent) + spread, colourOf(s.colour)];
        });
    }

    onKey(event) {
      const last = this.panel.categories.length - 1;
      const moves = { ArrowRight: this.selected + 1, ArrowLeft: this.selected - 1, Home: 0, End: last };
      if (event.key === "Escape") return hideTooltip();
      if (!(event.key in moves)) return;
      this.selected = clamp(moves[event.key], 0, last);
      const box = this.host.querySelectorAll(".hit")[this.selected].getBoundingClientRect();
      showTooltip(
        this.panel.categories[this.selected],
        this.valuesAt(this.selected),
        box.left + box.width / 2,
        box.top + box.height / 2,
      );
      announce(this.panel.categories[this.selected], this.valuesAt(this.selected));
      event.preventDefault();
    }

    table() {
      return [
        ["", ...this.panel.series.map(s => s.name)],
        ...this.panel.categories.map((category, c) => [
          category,
          ...this.panel.series.map(s => formatNumber(s.values[c], this.panel.percent)),
        ]),
      ];
    }
  }

  Object.assign(Holdfast, { BarsPanel });
}
