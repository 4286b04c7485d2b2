// Values of a chart at a step, under the pointer or moved with arrow keys: read from its table.
for (const chart of document.querySelectorAll(".chart")) {
  const plot = chart.querySelector(".plot"), svg = plot.querySelector("svg");
  const cursor = svg.querySelector(".cursor"), when = chart.querySelector(".at");
  const values = chart.querySelectorAll(".legend b"), last = [...values].map((b) => b.textContent);
  const rows = [...chart.querySelectorAll("tbody tr")];
  const steps = rows.map((row) => Number(row.cells[0].textContent));
  const axis = svg.querySelector(".grid"), end = steps[steps.length - 1] || 1;
  const [left, right] = ["x1", "x2"].map((key) => Number(axis.getAttribute(key)));
  let at = rows.length - 1;
  const show = (row) => {
    at = Math.min(Math.max(row, 0), rows.length - 1);
    const x = left + ((right - left) * steps[at]) / end;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    values.forEach((b, i) => { b.textContent = rows[at].cells[i + 1].textContent || "–"; });
    when.textContent = `step ${steps[at]}`;
  };
  const rest = () => {
    cursor.style.visibility = "hidden";
    values.forEach((b, i) => { b.textContent = last[i]; });
    when.textContent = "last";
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const step = ((x - left) / (right - left)) * end;
    let nearest = 0;
    steps.forEach((each, i) => { if (Math.abs(each - step) < Math.abs(steps[nearest] - step)) nearest = i; });
    show(nearest);
  });
  plot.addEventListener("pointerleave", rest);
  plot.addEventListener("blur", rest);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rows.length - 1 };
    if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
  });
}
