// What a reader of the site sees: tables that do not fit, cells of one letter a line, what the search finds first.
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

async function opened(url, width) {
  const frame = Object.assign(document.createElement("iframe"), { width, height: 900, src: url });
  document.body.append(frame);
  await new Promise((done) => (frame.onload = done));
  return frame;
}

function linesOf(cell) {
  const lines = {};
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    [...walker.currentNode.data].forEach((letter, i) => {
      const range = cell.ownerDocument.createRange();
      range.setStart(walker.currentNode, i);
      range.setEnd(walker.currentNode, i + 1);
      // Code stands a little higher than the text beside it.
      const line = Math.round(range.getBoundingClientRect().bottom / 8);
      if (letter.trim()) lines[line] = (lines[line] || "") + letter;
    });
  }
  return Object.values(lines);
}

function faultsOf(page, width, mostColumns) {
  const found = [];
  const root = page.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} wide`);
  for (const table of page.querySelectorAll(".md-content table:not([class])")) {
    const room = table.closest(".md-typeset__scrollwrap") || page.body;
    if (table.rows[0].cells.length <= mostColumns && table.scrollWidth > room.clientWidth)
      found.push(`the table '${table.rows[0].innerText}' is ${table.scrollWidth} wide, in ${room.clientWidth}`);
    for (const lines of [...table.querySelectorAll("th, td")].map(linesOf))
      if (lines.length > 2 && lines.join("").length < 3 * lines.length) found.push(`a narrow cell: ${lines.join(" / ")}`);
  }
  return found.map((fault) => `${page.location.pathname} at ${width}: ${fault}`);
}

async function firstFound(url, words) {
  const frame = await opened(`${url}?q=${encodeURIComponent(words)}`, 1400);
  let link = null;
  for (let i = 0; i < 300 && !link; i++) {
    await pause(50);
    link = frame.contentDocument.querySelector(".md-search-result__link");
  }
  frame.remove();
  return link && new URL(link.href).pathname.slice(1);
}

async function look({ pages, widths, searches }) {
  const faults = [];
  for (const page of pages) {
    const frame = await opened(page, widths[0][0]);
    // The theme wraps the tables when it starts.
    const unwrapped = ".md-content table:not([class]):not(.md-typeset__table *)";
    for (let i = 0; i < 1000 && frame.contentDocument.querySelector(unwrapped); i++) await pause(20);
    for (const [width, mostColumns] of widths) {
      frame.width = width;
      faults.push(...faultsOf(frame.contentDocument, width, mostColumns));
    }
    frame.remove();
  }
  const found = [];
  for (const [start, words] of searches) found.push(await firstFound(start, words));
  return { faults, found };
}

const report = (jobs) =>
  look(jobs)
    .catch((error) => ({ faults: [error.stack], found: [] }))
    .then((seen) => fetch("/report", { method: "POST", body: JSON.stringify(seen) }));
