(function () {
  "use strict";
  var tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.appendChild(tip);
  var hair = document.createElement("div");
  hair.className = "hair";

  function show(text, event) {
    tip.textContent = text;
    tip.hidden = false;
    var right = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
    tip.style.left = Math.max(4, event.clientX + (right ? -tip.offsetWidth - 10 : 14)) + "px";
    tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 10) + "px";
  }

  function nearest(steps, step) {
    return steps.reduce(function (best, other, index) {
      return Math.abs(steps[best] - step) > Math.abs(other - step) ? index : best;
    }, 0);
  }

  function chart(svg, event, box) {
    var low = +svg.dataset.low, high = +svg.dataset.high;
    var wanted = low + (high - low) * (event.clientX - box.left) / box.width;
    var lines = [], at = null;
    svg.querySelectorAll("[data-x]").forEach(function (path) {
      var steps = path.dataset.x.split(" ").map(Number);
      var index = nearest(steps, wanted);
      if (at === null) { at = steps[index]; }
      if (lines.length === 0 || Math.abs(steps[index] - at) * 50 <= high - low) {
        lines.push(path.dataset.name + "  " + path.dataset.y.split(" ")[index]);
      }
    });
    hair.style.left = 100 * (at - low) / (high - low) + "%";
    svg.parentNode.appendChild(hair);
    show(svg.dataset.across + " " + at.toLocaleString("en") + "\n" + lines.join("\n"), event);
  }

  function heat(svg, event, box) {
    var rows = svg.dataset.rows.split(";"), firsts = svg.dataset.firsts.split(" ").map(Number);
    var row = Math.min(rows.length - 1, Math.max(0, Math.floor(rows.length * (event.clientY - box.top) / box.height)));
    var step = firsts[0] + (+svg.dataset.last + 1 - firsts[0]) * (event.clientX - box.left) / box.width;
    var column = 0;
    firsts.forEach(function (first, index) { if (step >= first) { column = index; } });
    var end = (firsts[column + 1] || +svg.dataset.last + 1) - 1;
    var value = rows[row].split(" ")[column];
    var share = (100 * value / rows.length).toFixed(1);
    var span = end === firsts[column] ? "step " + end : "steps " + firsts[column] + " to " + end;
    var text = svg.dataset.row === "expert" ? share + " % of routes, " + value + "× uniform" : value + " s a step";
    show(svg.dataset.row + " " + row + ", " + span + "\n" + text, event);
  }

  function matrix(svg, event, box) {
    var rows = svg.dataset.cells.split(";"), size = rows.length;
    function place(part, whole) { return Math.min(size - 1, Math.max(0, Math.floor(size * part / whole))); }
    var row = place(event.clientY - box.top, box.height), column = place(event.clientX - box.left, box.width);
    var cell = rows[row].split(" ")[column].split("/");
    if (cell[0] === "-") { tip.hidden = true; return; }
    var names = svg.dataset.down + " " + row + ", " + svg.dataset.across + " " + column;
    show(names + "\n" + cell[0].replace("_", " ") + ", " + cell[1] + "× even", event);
  }

  document.querySelectorAll("svg[data-low], svg[data-rows], svg[data-cells]").forEach(function (svg) {
    svg.addEventListener("pointermove", function (event) {
      var box = svg.getBoundingClientRect();
      if (svg.dataset.rows) { heat(svg, event, box); } else if (svg.dataset.cells) { matrix(svg, event, box); } else if (svg.querySelector("[data-x]")) { chart(svg, event, box); }
    });
    svg.addEventListener("pointerleave", function () {
      tip.hidden = true;
      hair.remove();
    });
  });

  function sort(table, head) {
    var column = head.cellIndex, body = table.tBodies[table.tBodies.length - 1];
    var before = head.getAttribute("aria-sort"), first = body.rows[0].cells[column];
    var ascends = before ? before === "descending" : !("value" in first.dataset);
    function value(row) {
      var cell = row.cells[column];
      return "value" in cell.dataset ? (cell.dataset.value === "" ? null : +cell.dataset.value) : cell.textContent;
    }
    function compare(one, other) {
      var a = value(one), b = value(other);
      if (a === null || b === null) { return (a === null) - (b === null); }
      var order = typeof a === "string" ? a.localeCompare(b) : a - b;
      return ascends ? order : -order;
    }
    Array.from(body.rows).sort(compare).forEach(function (row) { body.appendChild(row); });
    table.querySelectorAll("[aria-sort]").forEach(function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", ascends ? "ascending" : "descending");
  }

  document.querySelectorAll(".sortable").forEach(function (table) {
    table.querySelectorAll("thead th").forEach(function (head) {
      if (head.textContent === "") { return; }
      head.tabIndex = 0;
      head.addEventListener("click", function () { sort(table, head); });
      head.addEventListener("keydown", function (event) {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, head); }
      });
    });
  });
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (details) { details.open = true; });
  });
})();
