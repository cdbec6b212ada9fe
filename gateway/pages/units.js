// Numbers formatted for people.

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 1000 && power < units.length - 1) [count, power] = [count / 1000, power + 1];
  return `${count < 10 && power ? count.toFixed(1) : Math.round(count)}\u00a0${units[power]}`;
}

export function duration(ms) {
  if (ms < 999.5) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)}\u00a0ms`;
  if (ms < 90_000) return `${(ms / 1000).toFixed(1)}\u00a0s`;
  return ms < 5_400_000 ? `${Math.round(ms / 60_000)}\u00a0min` : `${(ms / 3_600_000).toFixed(1)}\u00a0h`;
}

/** A length of time in whole seconds, minutes or hours. */
export function roughly(seconds) {
  if (seconds < 90) return `${Math.round(seconds)}\u00a0s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)}\u00a0min` : `${Math.round(seconds / 3600)}\u00a0h`;
}

export const ago = (seconds) => `${roughly(seconds)}\u00a0ago`;

export const count = (number) => Math.round(number).toLocaleString("en");
export const share = (part, whole) => (whole ? Math.max(0, Math.min(1, part / whole)) : 0);
export const percent = (part, whole) => `${Math.round(100 * share(part, whole))} %`;
