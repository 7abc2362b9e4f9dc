/* A figure: its legend, its slider, its panels, its summary and its tables. */
"use strict";
{
  const {
    el,
    svg,
    colourOf,
    variantOf,
    dashOf,
    LinesPanel,
    ScatterPanel,
    BarsPanel,
    HeatmapPanel,
    BubblesPanel,
  } = Holdfast;

  const KINDS = {
    lines: LinesPanel,
    scatter: ScatterPanel,
    bars: BarsPanel,
    heatmap: HeatmapPanel,
    bubbles: BubblesPanel,
  };

  class FigureView {
    constructor(figure) {
      this.figure = figure;
      this.hidden = new Set();
      this.section = el("section", {
        class: "figure",
        id: `figure-${figure.name}`,
        "data-figure": figure.name,
        tabindex: "-1",
        "aria-labelledby": `title-${figure.name}`,
      });
      this.build();
    }

    close() {
      for (const { view } of this.views || []) if (view.close) view.close();
    }

    build() {
      this.close();
      const { name, title, reading, source, panels } = this.figure;
      const names = panel => (panel.series || []).map(s => s.name).join("\n"),
        first = panels.map(names)[0];
      this.shared = panel =>
        first !== "" && panels.filter(p => names(p) === first).length > 1 && names(panel) === first;
      this.views = panels.map(panel => {
        const host = el("div", {
          class: `plot ${panel.kind}`,
          tabindex: "0",
          role: "img",
          "data-kind": panel.kind,
        });
        const view = new KINDS[panel.kind](host, panel, this.hidden);
        const key = el("div", { class: "key" });
        const wide =
          panel.kind === "bubbles" ||
          (panel.kind === "bars" && panel.categories.length > 12) ||
          (panel.kind === "heatmap" && panels.length === 1);
        return {
          view,
          host,
          key,
          box: el(
            "div",
            { class: wide ? "panel wide" : "panel" },
            ...(panel.title ? [el("h3", {}, panel.title)] : []),
            host,
            key,
          ),
        };
      });
      this.legend = el("div", { class: "key common" });
      this.summary = el("p", { class: "summary" });
      this.numbers = el("details", { class: "numbers" }, el("summary", {}, "The numbers"));
      this.numbers.addEventListener("toggle", () => this.tables());
      this.section.replaceChildren(
        el("h2", { id: `title-${name}` }, title),
        el("p", { class: "reading" }, reading, " ", el("span", { class: "source" }, `As in ${source}.`)),
        this.slider(),
        this.legend,
        el("div", { class: panels.length % 3 ? "panels" : "panels thirds" }, ...this.views.map(v => v.box)),
        this.summary,
        this.numbers,
      );
      this.shape = this.shapeOf(this.figure);
    }

    shapeOf(figure) {
      return figure.panels
        .map(p => p.kind + p.title + (p.series || []).map(s => s.name).join("\n"))
        .join("\n\n");
    }

    slider() {
      const names = [...new Set(this.figure.panels.flatMap(p => (p.steps || []).map(f => f.name)))];
      names.sort((a, b) => parseInt(a.replace(/\D/g, ""), 10) - parseInt(b.replace(/\D/g, ""), 10));
      this.names = names;
      if (names.length < 2) return "";
      const label = el("output", {}, ""),
        input = el("input", {
          type: "range",
          min: 0,
          max: names.length - 1,
          step: 1,
          "aria-label": `Choose what to show, ${names[0]} to ${names[names.length - 1]}`,
        });
      this.setStep = at => {
        input.value = at;
        label.textContent = names[at];
        input.setAttribute("aria-valuetext", names[at]);
        this.stepName = names[at];
        for (const { view } of this.views) if (view.showStep) view.showStep(names[at]);
        if (this.numbers && this.numbers.open) this.tables();
      };
      input.addEventListener("input", () => this.setStep(Number(input.value)));
      this.startStep =
        this.stepName && names.includes(this.stepName)
          ? names.indexOf(this.stepName)
          : this.figure.name === "strip"
            ? names.length - 1
            : 0;
      return el("div", { class: "slider" }, input, label);
    }

    draw() {
      for (const { view } of this.views) view.draw();
      if (this.names.length > 1) this.setStep(this.startStep);
      this.updateTexts();
    }

    updateTexts() {
      this.summary.textContent = this.figure.summary;
      this.views.forEach(({ host, view, key }) => {
        host.setAttribute(
          "aria-label",
          `${view.panel.title || this.figure.title}. ${this.figure.summary} Arrow keys read the values, plus and minus zoom, Escape resets.`,
        );
        if (view.scale) key.replaceChildren(view.scale());
        else if (!this.shared(view.panel)) key.replaceChildren(...this.legendEntries(view.panel));
      });
      const first = this.views[0].view.panel;
      this.legend.replaceChildren(...(this.shared(first) ? this.legendEntries(first) : []));
    }

    legendEntries(panel) {
      if (panel.series.length < 2)
        return panel.series.length && panel.kind === "lines"
          ? [this.legendEntry(panel, panel.series[0])]
          : [];
      return panel.series.map(series => {
        const button = el(
          "button",
          { type: "button", "aria-pressed": String(!this.hidden.has(series.name)), title: "Show or hide" },
          this.symbol(panel, series),
          series.name,
        );
        button.addEventListener("click", () => {
          if (!this.hidden.delete(series.name)) this.hidden.add(series.name);
          button.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
          for (const { view } of this.views) view.toggle();
        });
        return button;
      });
    }

    legendEntry(panel, series) {
      return el("span", { class: "only" }, this.symbol(panel, series), series.name);
    }

    symbol(panel, series) {
      const colour = colourOf(series.colour),
        drawing = svg("svg", { width: 26, height: 12, "aria-hidden": "true" });
      if (panel.kind === "lines")
        drawing.append(
          svg("line", {
            x1: 1,
            x2: 25,
            y1: 6,
            y2: 6,
            stroke: colour,
            "stroke-width": 3,
            "stroke-dasharray": dashOf(series).join(" "),
          }),
        );
      else if (panel.kind === "scatter") {
        const shapes = [
          () => svg("circle", { cx: 13, cy: 6, r: 4.5, fill: colour }),
          () => svg("rect", { x: 9, y: 2, width: 8, height: 8, fill: colour }),
          () => svg("path", { d: "M13 1 L18 11 L8 11 Z", fill: colour }),
          () => svg("path", { d: "M13 0 L19 6 L13 12 L7 6 Z", fill: colour }),
        ];
        drawing.append(shapes[variantOf(series.colour)]());
      } else drawing.append(svg("rect", { x: 4, y: 1, width: 18, height: 10, fill: colour }));
      return drawing;
    }

    tables() {
      if (!this.numbers.open) return;
      const tables = this.views.map(({ view }) => {
        const [head, ...rows] = view.table();
        const table = el(
          "table",
          {},
          el("caption", {}, view.panel.title || this.figure.title),
          el("thead", {}, el("tr", {}, ...head.map(cell => el("th", { scope: "col" }, cell)))),
          el(
            "tbody",
            {},
            ...rows.map(([first, ...cells]) =>
              el("tr", {}, el("th", { scope: "row" }, first), ...cells.map(cell => el("td", {}, cell))),
            ),
          ),
        );
        return el(
          "div",
          {
            class: "scroll",
            tabindex: "0",
            role: "region",
            "aria-label": view.panel.title || this.figure.title,
          },
          table,
        );
      });
      this.numbers.replaceChildren(this.numbers.firstElementChild, ...tables);
    }

    update(figure) {
      const same =
        this.shapeOf(figure) === this.shape &&
        figure.panels.every(
          (p, i) => (p.steps || []).length < 2 && (this.figure.panels[i].steps || []).length < 2,
        );
      this.figure = figure;
      if (!same) {
        this.build();
        this.draw();
        return;
      }
      figure.panels.forEach((panel, i) => this.views[i].view.update(panel));
      this.updateTexts();
      this.tables();
    }

    resize() {
      for (const { view } of this.views) view.resize();
    }
  }

  Object.assign(Holdfast, { FigureView });
}
