// Light, dark, or as the system: chosen on the chat page, kept by both.

const STORED = "tandem-theme";

export function useTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export function storedTheme() {
  try {
    return localStorage.getItem(STORED) ?? "system";
  } catch {
    return "system";
  }
}

export function storeTheme(theme) {
  try {
    localStorage.setItem(STORED, theme);
  } catch {
    // Storage is forbidden: the choice lasts as long as the page.
  }
}
