// Numbers formatted for people.

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 1000 && power < units.length - 1) [count, power] = [count / 1000, power + 1];
  return `${count < 10 && power ? count.toFixed(1) : Math.round(count)}\u00a0${units[power]}`;
}

export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

export const count = (number) => Math.round(number).toLocaleString("en");
export const share = (part, whole) => (whole ? Math.max(0, Math.min(1, part / whole)) : 0);
export const percent = (part, whole) => `${Math.round(100 * share(part, whole))} %`;
