/** The calls of the picked module or class: their number, and the distribution of their durations. */
import { useComputed } from "@preact/signals";
import { callStats } from "../../analysis/call-stats";
import { formatCount, formatDuration, plural } from "../../format";
import type { Store } from "../../store";
import { CopyButton } from "../copy-button";
import { Icon } from "../icons";

function Histogram({ bins, phase }: { bins: readonly number[]; phase: string }) {
  const highest = Math.max(...bins);
  return (
    <div class={`histogram ${phase}`} aria-hidden="true">
      {bins.map((calls, bin) => (
        <span
          key={bin}
          title={plural(calls, "call")}
          style={{ height: calls ? `max(2px, ${(calls / highest) * 100}%)` : "0" }}
        />
      ))}
    </div>
  );
}

export function CallStatsCard({ store, group }: { store: Store; group: number }) {
  const stats = useComputed(() =>
    callStats(store.trace, store.groups.value, store.pickedGroup.value ?? group, store.device.value, store.range.value),
  );
  const { title } = store.groups.value.groups[group];
  return (
    <section class="call-stats" aria-label={`Calls of ${title}`}>
      <h2>
        {title}
        <CopyButton text={() => title} label="Copy name" />
        <button type="button" class="icon-button" aria-label="Close" onClick={() => store.pickGroup(null)}>
          <Icon name="close" />
        </button>
      </h2>
      {stats.value.map(({ phase, calls, min, p50, p95, max, longest, bins }) => (
        <div key={phase} class="phase-stats">
          <Histogram bins={bins} phase={phase} />
          <p>
            <strong>{phase}</strong> {formatCount(calls)} × · min {formatDuration(min)} · p50 {formatDuration(p50)} ·
            p95 {formatDuration(p95)} ·{" "}
            <button type="button" class="link" onClick={() => store.select(longest)}>
              max {formatDuration(max)}
            </button>
          </p>
        </div>
      ))}
      {!stats.value.length && <p class="hint">It has no call in this range.</p>}
    </section>
  );
}
