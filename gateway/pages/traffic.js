// Names that stand for several revisions: the share of requests that each revision is given, and what it got.

import { make, say } from "./dom.js";
import { count, roughly } from "./units.js";

const percents = (share) => `${Number((100 * share).toFixed(1))}\u00a0%`;
const sum = (numbers) => Object.values(numbers).reduce((total, number) => total + number, 0);

/** One revision: a bar of the requests that it got, with a mark at its share. */
class Row {
  constructor(revision) {
    this.fill = make("div", { class: "fill" });
    this.mark = make("i");
    this.shares = make("td");
    this.routed = make("td");
    this.count = make("td");
    this.away = make("span", { class: "problem" });
    const track = make("div", { class: "track", "aria-hidden": "true" }, this.fill, this.mark);
    const name = make("th", { scope: "row" }, revision, " ", this.away);
    this.element = make("tr", {}, name, make("td", { class: "bar" }, track), this.shares, this.routed, this.count);
  }

  show(share, got, total, isAway) {
    say(this.shares, percents(share));
    say(this.routed, total ? percents(got / total) : "–");
    say(this.count, count(got));
    say(this.away, isAway ? "no workers" : "");
    this.fill.style.width = `${total ? (100 * got) / total : 0}%`;
    this.mark.style.left = `${100 * share}%`;
  }
}

/** One name and its revisions. */
class Table {
  constructor(name) {
    this.about = make("small");
    this.body = make("tbody");
    this.rows = new Map();
    const heads = ["Revision", "", "Share", "Routed", "Requests"].map((head) => make("th", { scope: "col" }, head));
    const caption = make("caption", {}, name, " ", this.about);
    this.element = make("table", { class: "card" }, caption, make("thead", {}, make("tr", {}, ...heads)), this.body);
  }

  show(shares, { requests, span_s: spanS }, alive) {
    const [all, total] = [sum(shares), sum(requests)];
    const revisions = [...new Set([...Object.keys(shares), ...Object.keys(requests)])].sort((one, other) => (shares[other] ?? 0) - (shares[one] ?? 0) || one.localeCompare(other, "en", { numeric: true }));
    say(this.about, `requests of the last ${roughly(spanS)}`);
    for (const revision of revisions) {
      if (!this.rows.has(revision)) this.rows.set(revision, new Row(revision));
      this.rows.get(revision).show((shares[revision] ?? 0) / all, requests[revision] ?? 0, total, !alive.has(revision));
    }
    const inOrder = revisions.map((revision) => this.rows.get(revision).element);
    if (inOrder.length !== this.body.children.length || inOrder.some((row, index) => this.body.children[index] !== row)) this.body.replaceChildren(...inOrder);
  }
}

export class Traffic {
  /** `section` is shown while there are such names; `element` gets a table for each. */
  constructor(section, element) {
    Object.assign(this, { section, element, tables: new Map() });
  }

  show({ traffic, routed, workers }) {
    const alive = new Set(workers.filter(({ role, serving }) => role === "decode" && serving).map(({ model }) => model));
    this.section.hidden = Object.keys(traffic).length === 0;
    for (const [name, table] of this.tables) {
      if (name in traffic) continue;
      table.element.remove();
      this.tables.delete(name);
    }
    for (const [name, shares] of Object.entries(traffic)) {
      if (!this.tables.has(name)) {
        this.tables.set(name, new Table(name));
        this.element.append(this.tables.get(name).element);
      }
      this.tables.get(name).show(shares, routed[name] ?? { requests: {}, span_s: 0 }, alive);
    }
  }
}
