/* Draws the report from the model in the page. */
"use strict";
Holdfast.themeButton(document.getElementById("theme"));
window.holdfastPage = Holdfast.render(
  document.getElementById("page"),
  JSON.parse(document.getElementById("model").textContent),
);
