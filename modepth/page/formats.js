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
    if (count < 1000 || unit === "GB") return `${count < 10 ? Number(count.toFixed(1)) : Math.round(count)} ${unit}`;
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
  const raised = [...String(exponent)].map((letter) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(letter)]).join("");
  const factor = Number((value / 10 ** exponent).toPrecision(3));
  return factor === 1 ? `10${raised}` : `${factor}·10${raised}`;
}

// A token as a label: white space visible.
function visible(text) {
  const shown = { "\n": "⏎", " ": "·", "\t": "⇥", "\r": "←" };
  return [...text].map((letter) => shown[letter] ?? letter).join("");
}
