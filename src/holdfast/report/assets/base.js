/* Helpers of all scripts: elements, numbers, colours, the tooltip.
   Texts are added to the page as text, never as markup. */
"use strict";
const Holdfast = {};
{
  const PANEL_HEIGHT = 300;
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

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

  function formatNumber(value, percent) {
    if (value === null || value === undefined) return "–";
    if (percent) return `${(100 * value).toFixed(1)} %`;
    const size = Math.abs(value);
    return Number.isInteger(value)
      ? value.toLocaleString("en")
      : size >= 1e-3 && size < 1e5
        ? String(+value.toPrecision(4))
        : value.toExponential(2);
  }

  function evenlySpaced(length, limit) {
    if (length <= limit) return [...Array(length).keys()];
    return [...new Set([...Array(limit).keys()].map(i => Math.round((i * (length - 1)) / (limit - 1))))];
  }

  let palette;

  const setPalette = chosen => {
    palette = chosen;
  };

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shades = () => palette[isDark() ? "dark" : "light"];
  const colourOf = number => shades().series[number % shades().series.length];
  const variantOf = number => Math.floor(number / shades().series.length) % palette.dashes.length;
  const dashOf = series => (series.dashed ? [5, 4] : palette.dashes[variantOf(series.colour)]);

  function rgb(hex) {
    return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  }

  function ramp(share) {
    const stops = shades().ramp,
      place = clamp(share, 0, 1) * (stops.length - 1),
      at = Math.min(stops.length - 2, Math.floor(place));
    const from = rgb(stops[at]),
      to = rgb(stops[at + 1]),
      mix = place - at;
    return from.map((channel, i) => Math.round(channel + (to[i] - channel) * mix));
  }

  function marker(context, variant, x, y, size) {
    context.beginPath();
    if (variant === 1) context.rect(x - size, y - size, 2 * size, 2 * size);
    else if (variant === 2) {
      context.moveTo(x, y - 1.2 * size);
      context.lineTo(x + 1.2 * size, y + size);
      context.lineTo(x - 1.2 * size, y + size);
      context.closePath();
    } else if (variant === 3) {
      context.moveTo(x, y - 1.4 * size);
      context.lineTo(x + 1.4 * size, y);
      context.lineTo(x, y + 1.4 * size);
      context.lineTo(x - 1.4 * size, y);
      context.closePath();
    } else context.arc(x, y, size, 0, 2 * Math.PI);
    context.fill();
  }

  const tooltip = el("div", { class: "tooltip", hidden: "" });
  const announcer = el("div", { class: "visually-hidden", role: "status", "aria-live": "polite" });

  function showTooltip(title, rows, left, top) {
    tooltip.replaceChildren(
      el("strong", {}, title),
      ...rows.map(([name, value, colour]) => {
        const swatch = el("i", {});
        if (colour) swatch.style.background = colour;
        return el("div", {}, swatch, el("span", {}, name), el("b", {}, value));
      }),
    );
    tooltip.hidden = false;
    const box = tooltip.getBoundingClientRect();
    tooltip.style.left = `${left + 14 + box.width > innerWidth ? Math.max(4, left - box.width - 14) : left + 14}px`;
    tooltip.style.top = `${clamp(top - box.height / 2, 4, innerHeight - box.height - 4)}px`;
  }

  const hideTooltip = () => {
    tooltip.hidden = true;
  };
  const announce = (title, rows) => {
    announcer.textContent = `${title}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}`;
  };

  Object.assign(Holdfast, {
    PANEL_HEIGHT,
    FONT,
    el,
    svg,
    clamp,
    formatNumber,
    evenlySpaced,
    isDark,
    css,
    colourOf,
    variantOf,
    dashOf,
    rgb,
    ramp,
    marker,
    tooltip,
    announcer,
    showTooltip,
    hideTooltip,
    announce,
    setPalette,
  });
}
