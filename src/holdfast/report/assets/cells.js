/* Panels of cells on a canvas: heat maps, and bubbles of samples by client and class. */
"use strict";
{
  const {
    FONT,
    el,
    svg,
    clamp,
    formatNumber,
    evenlySpaced,
    css,
    colourOf,
    rgb,
    ramp,
    showTooltip,
    hideTooltip,
    announce,
  } = Holdfast;

  const CELL_STEPS = 200,
    CELL_MISSING = 255; // as in holdfast.report.panels

  function bytes(base64) {
    const text = atob(base64),
      array = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
    return array;
  }

  class CellsPanel {
    constructor(host, panel) {
      Object.assign(this, { host, panel });
      this.step = 0;
      this.from = 0;
      this.to = panel.columns.length;
      this.canvas = el("canvas", { "aria-hidden": "true" });
      host.append(this.canvas);
      this.canvas.addEventListener("mousemove", event => this.hover(event));
      this.canvas.addEventListener("mouseleave", () => {
        this.hovered = null;
        hideTooltip();
        if (!this.drag) this.paint();
      });
      this.canvas.addEventListener("mousedown", event => {
        const cell = this.cell(event);
        this.drag = cell && { from: cell.column, to: cell.column };
        addEventListener("mouseup", () => this.drop(), { once: true }); // also outside of the plot
      });
      this.canvas.addEventListener("dblclick", () => this.range(0, this.panel.columns.length));
      host.addEventListener("keydown", event => this.onKey(event));
      host.addEventListener("blur", () => {
        this.hovered = null;
        hideTooltip();
        this.paint();
      });
    }

    update(panel) {
      const whole = this.from === 0 && this.to === this.panel.columns.length;
      this.panel = panel;
      this.decoded = null;
      if (whole || this.to > panel.columns.length) {
        this.from = 0;
        this.to = panel.columns.length;
      }
      this.draw();
    }

    toggle() {}
    resize() {
      if (this.width !== this.host.clientWidth) this.draw();
    }
    showStep(name) {
      const at = this.panel.steps.findIndex(step => step.name === name);
      if (at >= 0 && at !== this.step) {
        this.step = at;
        this.hovered = null;
        this.draw();
      }
    }
    range(from, to) {
      this.from = from;
      this.to = to;
      this.hovered = null;
      this.draw();
    }

    draw() {
      this.step = Math.min(this.step, this.panel.steps.length - 1);
      this.width = Math.max(240, this.host.clientWidth);
      const context = (this.context = this.canvas.getContext("2d"));
      context.font = FONT;
      const rows = this.rowNames(),
        columns = this.panel.columns;
      const longest = Math.max(...rows.map(name => context.measureText(this.shortened(name)).width));
      this.left = Math.ceil(longest) + 36;
      this.top = this.topMargin();
      this.rowHeight = clamp(Math.floor(300 / rows.length), this.minRowHeight(), 26);
      this.globalGap = this.panel.global_rows ? 7 : 0;
      const widestLabel =
        Math.max(...columns.map(name => context.measureText(this.shortened(name)).width)) + 10;
      this.columnWidth = (this.width - this.left - 10) / (this.to - this.from);
      this.slanted = this.panel.global_rows && widestLabel > this.columnWidth;
      this.labelEvery = this.slanted
        ? Math.ceil(14 / this.columnWidth)
        : Math.max(1, Math.ceil(widestLabel / this.columnWidth));
      const bottom = this.slanted ? widestLabel * 0.75 + 34 : 40;
      this.height = this.top + rows.length * this.rowHeight + 2 * this.globalGap + bottom;
      this.canvas.width = Math.round(this.width * devicePixelRatio);
      this.canvas.height = Math.round(this.height * devicePixelRatio);
      this.canvas.style.width = `${this.width}px`;
      this.canvas.style.height = `${this.height}px`;
      this.paint();
    }

    shortened(name) {
      return name.length > 18 ? `${name.slice(0, 17)}…` : name;
    }
    x(column) {
      return this.left + (column - this.from) * this.columnWidth;
    }
    y(row) {
      return (
        this.top +
        row * this.rowHeight +
        (row > 0 ? this.globalGap : 0) +
        (this.panel.global_rows && row === this.rowNames().length - 1 ? this.globalGap : 0)
      );
    }

    paint() {
      const context = this.context,
        rows = this.rowNames(),
        columns = this.panel.columns;
      context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      context.clearRect(0, 0, this.width, this.height);
      context.font = FONT;
      this.cells(context, rows, columns);
      context.fillStyle = css("--muted");
      context.textBaseline = "middle";
      context.textAlign = "right";
      const each = Math.ceil(13 / this.rowHeight);
      rows.forEach((name, r) => {
        if (r % each === 0 || (this.panel.global_rows && r === rows.length - 1))
          if (!(this.panel.global_rows && each > 1 && r > rows.length - 1 - each && r < rows.length - 1))
            context.fillText(this.shortened(name), this.left - 7, this.y(r) + this.rowHeight / 2);
      });
      const below = this.y(rows.length - 1) + this.rowHeight + 6;
      for (let c = this.from; c < this.to; c++) {
        if ((c - this.from) % this.labelEvery) continue;
        context.save();
        context.translate(this.x(c) + this.columnWidth / 2, below);
        if (this.slanted) {
          context.rotate(-Math.PI / 4);
          context.textAlign = "right";
          context.textBaseline = "middle";
        } else {
          context.textAlign = "center";
          context.textBaseline = "top";
        }
        context.fillText(this.shortened(columns[c]), 0, this.slanted ? 4 : 0);
        context.restore();
      }
      context.textAlign = "center";
      context.textBaseline = "bottom";
      context.fillText(this.panel.x_label, (this.left + this.width - 10) / 2, this.height - 4);
      context.save();
      context.translate(12, this.top + (rows.length * this.rowHeight) / 2);
      context.rotate(-Math.PI / 2);
      context.textBaseline = "middle";
      context.fillText(this.panel.y_label, 0, 0);
      context.restore();
      context.strokeStyle = css("--text");
      context.lineWidth = 2;
      if (this.hovered)
        context.strokeRect(
          this.x(this.hovered.column),
          this.y(this.hovered.row),
          this.columnWidth,
          this.rowHeight,
        );
      if (this.drag && this.drag.from !== this.drag.to) {
        const [from, to] = [Math.min(this.drag.from, this.drag.to), Math.max(this.drag.from, this.drag.to)];
        context.strokeRect(
          this.x(from),
          this.top,
          (to - from + 1) * this.columnWidth,
          this.y(rows.length - 1) + this.rowHeight - this.top,
        );
      }
    }

    cell(event) {
      const box = this.canvas.getBoundingClientRect(),
        x = event.clientX - box.left,
        y = event.clientY - box.top;
      const column = this.from + Math.floor((x - this.left) / this.columnWidth);
      const row = this.rowNames().findIndex((_, r) => y >= this.y(r) && y < this.y(r) + this.rowHeight);
      return row < 0 || column < this.from || column >= this.to ? null : { row, column };
    }

    hover(event) {
      const cell = this.cell(event);
      if (this.drag && cell) this.drag.to = cell.column;
      this.hovered = cell;
      this.paint();
      if (!cell) return hideTooltip();
      showTooltip(...this.describe(cell), event.clientX, event.clientY);
    }

    drop() {
      if (!this.drag) return;
      const from = Math.min(this.drag.from, this.drag.to),
        to = Math.max(this.drag.from, this.drag.to) + 1;
      this.drag = null;
      if (to - from > 1) this.range(from, to);
    }

    onKey(event) {
      const rows = this.rowNames().length,
        at = this.hovered || { row: 0, column: this.from - 1 };
      const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
      const span = this.to - this.from,
        total = this.panel.columns.length;
      if (event.key in moves) {
        const [down, right] = moves[event.key];
        this.hovered = {
          row: clamp(at.row + down, 0, rows - 1),
          column: clamp(at.column + right, this.from, this.to - 1),
        };
        this.paint();
        const box = this.canvas.getBoundingClientRect();
        showTooltip(
          ...this.describe(this.hovered),
          box.left + this.x(this.hovered.column) + this.columnWidth,
          box.top + this.y(this.hovered.row),
        );
        announce(...this.describe(this.hovered));
      } else if (event.key === "+" && span > 4) {
        const middle = this.hovered ? this.hovered.column : this.from + span / 2;
        const from = clamp(Math.round(middle - span / 4), 0, total - Math.ceil(span / 2));
        this.range(from, from + Math.ceil(span / 2));
      } else if (event.key === "-") {
        const from = Math.max(0, Math.round(this.from - span / 2));
        this.range(from, Math.min(total, from + 2 * span));
      } else if (event.key === "Escape" || event.key === "0") {
        this.range(0, total);
        hideTooltip();
      } else return;
      event.preventDefault();
    }
  }

  class HeatmapPanel extends CellsPanel {
    rowNames() {
      return this.panel.steps[this.step].rows;
    }
    topMargin() {
      return 8;
    }
    minRowHeight() {
      return this.rowNames().length > 60 ? 5 : 9;
    }

    values() {
      if (!this.decoded) this.decoded = new Map();
      if (!this.decoded.has(this.step)) {
        const step = this.panel.steps[this.step];
        this.decoded.set(this.step, {
          cells: bytes(step.cells),
          marked: step.marked && bytes(step.marked),
        });
      }
      return this.decoded.get(this.step);
    }

    share(row, column) {
      const value = this.values().cells[row * this.panel.columns.length + column];
      return value === CELL_MISSING ? null : value / CELL_STEPS;
    }

    cells(context, rows, columns) {
      const { marked } = this.values(),
        line = this.columnWidth > 6 ? 0.5 : 0,
        [unknown, dot, ring] = ["--grid", "--dot", "--ring"].map(css),
        radius = clamp(Math.min(this.rowHeight / 6, this.columnWidth / 3), 0.8, 3);
      for (let r = 0; r < rows.length; r++) {
        for (let c = this.from; c < this.to; c++) {
          const share = this.share(r, c);
          context.fillStyle = share === null ? unknown : `rgb(${ramp(share).join(",")})`;
          context.fillRect(
            this.x(c) + line,
            this.y(r) + line,
            this.columnWidth - 2 * line + (line ? 0 : 0.5),
            this.rowHeight - (this.rowHeight > 6 ? 1 : 0),
          );
          if (marked && marked[r * columns.length + c]) {
            context.beginPath();
            context.arc(
              this.x(c) + this.columnWidth / 2,
              this.y(r) + this.rowHeight / 2,
              radius,
              0,
              2 * Math.PI,
            );
            if (radius >= 2) {
              context.strokeStyle = ring; // the ring separates the dot from a cell of a similar colour
              context.lineWidth = 1.5;
              context.stroke();
            }
            context.fillStyle = dot;
            context.fill();
          }
        }
      }
    }

    describe({ row, column }) {
      const globalRows = this.panel.global_rows,
        name = this.rowNames()[row],
        other = this.panel.columns[column];
      const { marked } = this.values(),
        isHeld = marked && marked[row * this.panel.columns.length + column];
      const rows = [
        [
          globalRows ? `class ${other}` : `${this.panel.y_label} ${name}`,
          formatNumber(this.share(row, column), true),
        ],
      ];
      if (globalRows && row > 0 && row < this.rowNames().length - 1)
        rows.push(["held by the client", isHeld ? "yes" : "no"]);
      return [globalRows ? name : `${this.panel.x_label} ${other}`, rows];
    }

    table() {
      const kept = evenlySpaced(this.panel.columns.length, 30),
        rows = this.rowNames();
      return [
        [`${this.panel.y_label} \\ ${this.panel.x_label}`, ...kept.map(c => this.panel.columns[c])],
        ...rows.map((name, r) => [name, ...kept.map(c => formatNumber(this.share(r, c), true))]),
      ];
    }

    scale() {
      const bar = el("canvas", { width: 160, height: 10, "aria-hidden": "true" }),
        context = bar.getContext("2d");
      for (let x = 0; x < 160; x++) {
        context.fillStyle = `rgb(${ramp(x / 159).join(",")})`;
        context.fillRect(x, 0, 1, 10);
      }
      return el(
        "div",
        { class: "scale" },
        el("span", {}, "0 %", bar, "100 %"),
        ...(this.panel.steps.some(f => f.marked) ? [el("span", {}, "dot: the client holds the class")] : []),
      );
    }
  }

  class BubblesPanel extends CellsPanel {
    rowNames() {
      return this.panel.rows;
    }
    topMargin() {
      return this.panel.domains.length ? 20 : 8;
    }
    minRowHeight() {
      return this.panel.rows.length > 40 ? 6 : 18;
    }
    count(row, column) {
      return this.panel.steps[this.step].counts[column][row];
    }
    update(panel) {
      this.largest = null;
      super.update(panel);
    }
    /* Cached, since every circle uses it. */
    maxCount() {
      this.largest ??= Math.max(
        1,
        ...this.panel.steps.map(step => Math.max(...step.counts.map(row => Math.max(...row)))),
      );
      return this.largest;
    }
    radius(count) {
      return (
        Math.sqrt(count / this.maxCount()) *
        Math.max(3.5, Math.min(this.rowHeight, this.columnWidth * 1.6) / 2)
      );
    }
    domainNames() {
      return [...new Set(this.panel.domains)];
    }

    cells(context, rows, columns) {
      context.strokeStyle = css("--grid");
      context.lineWidth = 1;
      for (let r = 0; r < rows.length; r++) {
        context.beginPath();
        context.moveTo(this.left, this.y(r) + this.rowHeight / 2);
        context.lineTo(this.width - 10, this.y(r) + this.rowHeight / 2);
        context.stroke();
      }
      const names = this.domainNames();
      for (let c = this.from; c < this.to; c++) {
        const domain = names.indexOf(this.panel.domains[c]);
        context.fillStyle = colourOf(Math.max(0, domain));
        if (domain >= 0) context.fillRect(this.x(c) + 0.5, 4, this.columnWidth - 1, 8);
        context.globalAlpha = 0.8;
        for (let r = 0; r < rows.length; r++) {
          const count = this.count(r, c);
          if (!count) continue;
          context.beginPath();
          context.arc(
            this.x(c) + this.columnWidth / 2,
            this.y(r) + this.rowHeight / 2,
            Math.max(0.8, this.radius(count)),
            0,
            2 * Math.PI,
          );
          context.fill();
        }
        context.globalAlpha = 1;
      }
    }

    describe({ row, column }) {
      const domain = this.panel.domains[column];
      const rows = [[`class ${this.panel.rows[row]}`, `${formatNumber(this.count(row, column))} samples`]];
      if (domain) rows.push(["domain", domain]);
      return [`client ${this.panel.columns[column]}`, rows];
    }

    table() {
      return [
        ["client", ...this.panel.rows],
        ...this.panel.columns.map((name, c) => [
          name,
          ...this.panel.rows.map((_, r) => formatNumber(this.count(r, c))),
        ]),
      ];
    }

    scale() {
      const maxCount = this.maxCount(),
        sizes = [0.05, 0.3, 1].map(share => Math.max(1, +(maxCount * share).toPrecision(1)));
      const entries = sizes.map(size => {
        const radius = Math.max(1, this.radius(size)),
          box = 2 * radius + 2;
        return el(
          "span",
          {},
          svg(
            "svg",
            { width: box, height: box, "aria-hidden": "true" },
            svg("circle", { cx: box / 2, cy: box / 2, r: radius, fill: colourOf(0), opacity: 0.8 }),
          ),
          ` ${formatNumber(size)}`,
        );
      });
      const domains = this.domainNames().map((name, i) => {
        const swatch = el("i", { class: "swatch" });
        swatch.style.background = colourOf(i);
        return el("span", {}, swatch, ` ${name}`);
      });
      return el("div", { class: "scale" }, "samples: ", ...entries, ...domains);
    }
  }

  Object.assign(Holdfast, { HeatmapPanel, BubblesPanel });
}
