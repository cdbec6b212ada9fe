// Light, dark, or as the system: chosen on the chat page, kept by both.

import { browser } from "./remembered.js";

const STORED = "tandem-theme";

export function useTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export const storedTheme = () => browser.get(STORED) ?? "system";
export const storeTheme = (theme) => browser.set(STORED, theme);
