// Numbers as people read them, and elements. Text always goes in as text, never as markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function percent(share) {
  return `${Number((100 * share).toPrecision(3))} %`;
}

function bytes(count) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") return `${Number(count.toPrecision(3))} ${unit}`;
    count /= 1024;
  }
}

function compact(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e13 || size < 1e-3) return powerOfTen(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(4)));
}

function powerOfTen(value) {
  const exponent = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
  const raised = [...String(exponent)].map((digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)]).join("");
  const factor = Number((value / 10 ** exponent).toPrecision(3));
  return factor === 1 ? `10${raised}` : `${factor}·10${raised}`;
}

// A token on one line: white space visible, cut where it is longer than `most` letters.
function visible(text, most = Infinity) {
  const shown = { "\n": "⏎", " ": "·", "\t": "⇥", "\r": "←" };
  const letters = [...text].map((letter) => shown[letter] ?? letter);
  return letters.length <= most ? letters.join("") : `${letters.slice(0, most - 1).join("")}…`;
}
