// Creates elements from plain values. Text is inserted as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** Create an element. Attributes named on... are listeners, children are nodes or strings. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Set text only if it has changed, so that screen readers and selections are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** True for the Enter that sends: not with Shift, and not the one that ends a composition, which Safari sends behind its end. */
export const isSending = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

/** A button that asks: the first press shows `question`, the second acts. */
export function askFirst(button, question, act) {
  const label = button.textContent;
  button.addEventListener("click", () => {
    if (button.classList.contains("sure")) return act();
    button.classList.add("sure");
    say(button, question);
    const calm = () => (button.classList.remove("sure"), say(button, label));
    return button.addEventListener("blur", calm, { once: true });
  });
  return button;
}

/** Copy a text, and say so on the button for a moment. */
export async function copyText(button, text) {
  const label = button.dataset.label ?? (button.dataset.label = button.textContent);
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = copyBySelection(text) ? "Copied" : "Not copied";
  }
  button.textContent = said;
  setTimeout(() => (button.textContent = label), 1500);
}

/** Pages that came over plain HTTP from another machine have no clipboard, only this. */
function copyBySelection(text) {
  const field = make("textarea", { class: "hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  return isDone;
}

/** Save a text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
