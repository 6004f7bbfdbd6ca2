/** Copies a text, and confirms it for a moment. */
import { useSignal } from "@preact/signals";

const SHOWN_MS = 1500;

async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Frames without the permission refuse the clipboard, and pages of plain HTTP have none: use the older way.
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "visually-hidden";
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

export function CopyButton({ text, label }: { text: () => string; label: string }) {
  const copied = useSignal(false);
  const onClick = async () => {
    await copy(text());
    copied.value = true;
    setTimeout(() => {
      copied.value = false;
    }, SHOWN_MS);
  };
  return (
    <button type="button" class="more copy" onClick={onClick}>
      {copied.value ? "Copied" : label}
    </button>
  );
}
