"use strict";
// A probe is a response: the figures of the token under the pointer, or reached with the arrow keys, are shown below it.
for (const probe of document.querySelectorAll(".probe")) {
  const places = Array.from(probe.querySelectorAll("[data-tip]"));
  const output = probe.parentElement.querySelector("output");
  let at = -1;
  const show = (index) => {
    if (at >= 0) places[at].classList.remove("on");
    at = index;
    if (at >= 0) places[at].classList.add("on");
    output.textContent = at >= 0 ? places[at].dataset.tip : "";
  };
  places.forEach((place, index) => place.addEventListener("mouseenter", () => show(index)));
  places.forEach((place, index) => place.addEventListener("click", () => show(index)));
  probe.addEventListener("mouseleave", () => show(-1));
  probe.addEventListener("blur", () => show(-1));
  probe.addEventListener("keydown", (event) => {
    const last = places.length - 1;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last, Escape: -1 }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    show(next);
  });
}
