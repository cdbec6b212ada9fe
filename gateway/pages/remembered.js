// What the browser remembers for the pages. Where storage is forbidden or full, it lasts as long as the page.

function storage(kind) {
  const memory = new Map();
  return {
    /** The text under this name, or null. */
    get(name) {
      if (memory.has(name)) return memory.get(name);
      try {
        return window[kind].getItem(name);
      } catch {
        return null;
      }
    },
    set(name, text) {
      try {
        window[kind].setItem(name, text);
        memory.delete(name);
      } catch {
        memory.set(name, text);
      }
    },
  };
}

export const browser = storage("localStorage");
export const tab = storage("sessionStorage");
