// Plays a terminal recording (asciicast v2) in place of each link to a .cast file. It asks for that file and nothing else.
// It knows what this project's commands print: text, colours, moves of the cursor, and what erases lines.
const SHADES = ["#3b4048", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#abb2bf"];

class Screen {
  constructor(width, height) { Object.assign(this, {width, height, rows: [[]], y: 0, x: 0, style: ""}); }
  row() { while (this.rows.length <= this.y) this.rows.push([]); return this.rows[this.y]; }
  put(character) {
    if (this.x >= this.width) { this.x = 0; this.y++; }
    const row = this.row();
    while (row.length < this.x) row.push([" ", ""]);
    row[this.x++] = [character, this.style];
  }
  colour(codes) {
    for (const code of codes.length ? codes : [0]) {
      if (code === 0) this.style = "";
      else if (code === 1) this.style += "font-weight:bold;";
      else if (code === 2) this.style += "opacity:.65;";
      else if (code >= 30 && code < 38) this.style += `color:${SHADES[code - 30]};`;
      else if (code >= 90 && code < 98) this.style += `color:${SHADES[code - 90]};`;
      else if (code === 39) this.style += "color:inherit;";
      else if (code === 38) { this.style += `color:${SHADES[4]};`; break; }
    }
  }
  control(args, kind) {
    const numbers = args.split(";").filter(Boolean).map(Number), count = numbers[0] || 1;
    if (kind === "m") this.colour(numbers);
    else if (kind === "A") this.y = Math.max(0, this.y - count);
    else if (kind === "B") this.y += count;
    else if (kind === "C") this.x += count;
    else if (kind === "D") this.x = Math.max(0, this.x - count);
    else if (kind === "G") this.x = count - 1;
    else if (kind === "K") this.row().length = numbers[0] === 2 ? 0 : Math.min(this.row().length, this.x);
    else if (kind === "J") { this.row().length = Math.min(this.row().length, this.x); this.rows.length = this.y + 1; }
  }
  write(text) {
    for (const [piece, args, kind] of text.matchAll(/\x1b\[\??([\d;]*)([A-Za-z])|\x1b[^[]|[^\x1b]/gu)) {
      if (kind) this.control(args, kind);
      else if (piece === "\n") this.y++;
      else if (piece === "\r") this.x = 0;
      else if (piece === "\b") this.x = Math.max(0, this.x - 1);
      else if (piece >= " " && piece[0] !== "\x1b") this.put(piece);
    }
  }
  draw(place) {
    const lines = this.rows.slice(-this.height).map((row) => {
      const line = document.createElement("div");
      for (const [character, style] of row) {
        const last = line.lastChild;
        if (last && last.getAttribute("style") === style) last.textContent += character;
        else { const piece = document.createElement("span"); piece.setAttribute("style", style); piece.textContent = character; line.append(piece); }
      }
      if (!row.length) line.textContent = " ";
      return line;
    });
    place.replaceChildren(...lines);
  }
}

const play = async (link) => {
  const [header, ...events] = (await (await fetch(link.href)).text()).trim().split("\n").map((line) => JSON.parse(line));
  const figure = document.createElement("figure"), screen = document.createElement("pre"), bar = document.createElement("input");
  figure.style.cssText = "margin:1rem 0";
  screen.style.cssText = `height:${header.height * 1.35}em;overflow:auto;background:#1a1e23;color:#dfe3e8;padding:.8em;border-radius:8px;font:12px/1.35 ui-monospace,Menlo,Consolas,monospace;cursor:pointer;margin:0`;
  Object.assign(bar, {type: "range", min: 0, max: events.length, value: events.length, ariaLabel: header.title});
  bar.style.width = "100%";
  figure.append(screen, bar);
  link.parentElement.after(figure);
  let timer = null;
  const show = () => {
    const terminal = new Screen(header.width, header.height);
    for (const [, , text] of events.slice(0, +bar.value)) terminal.write(text);
    terminal.draw(screen);
  };
  const step = () => {
    show();
    const at = +bar.value;
    timer = at < events.length ? setTimeout(() => { bar.value = at + 1; step(); }, 1000 * (events[at][0] - (events[at - 1]?.[0] ?? 0))) : null;
  };
  screen.title = "Click to play or to stop";
  screen.onclick = () => {
    if (timer) { clearTimeout(timer); timer = null; return; }
    if (+bar.value === events.length) bar.value = 0;
    step();
  };
  bar.oninput = () => { clearTimeout(timer); timer = null; show(); };
  show();
};
for (const link of document.querySelectorAll('a[href$=".cast"]')) play(link);
