/** What is known about the selected slice. */
import type { ComponentChildren } from "preact";

import { alike } from "../neighbours";
import type { Store } from "../store";
import { formatCount, formatDuration, formatMoment } from "../text";
import { PHASES, selfTime } from "../trace";

function Field({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div class="field">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function Path({ store, span }: { store: Store; span: number }) {
  const { spans, names } = store.trace;
  const path: number[] = [];
  for (let at = spans.parent[span]; at >= 0; at = spans.parent[at]) path.unshift(at);
  return (
    <nav class="path" aria-label="Slices around it">
      {path.map((at) => (
        <button key={at} type="button" class="link" onClick={() => store.select(at)}>
          {names[spans.name[at]].label}
        </button>
      ))}
      <span>{names[spans.name[span]].fqn}</span>
    </nav>
  );
}

function Halves({ store, span }: { store: Store; span: number }) {
  const { spans, tracks } = store.trace;
  const others = store.halves(span).filter((other) => other !== span);
  if (!others.length) return <>none</>;
  return (
    <span class="links">
      {others.slice(0, 12).map((other) => (
        <button key={other} type="button" class="link" onClick={() => store.select(other)}>
          {tracks[spans.track[other]].kind} at {formatMoment(spans.start[other])}
        </button>
      ))}
      {others.length > 12 && ` and ${formatCount(others.length - 12)} more`}
    </span>
  );
}

function Calls({ store, span }: { store: Store; span: number }) {
  const { all, at } = alike(store.trace.spans, span);
  return (
    <span class="links">
      {formatCount(at + 1)} of {formatCount(all.length)}
      <button type="button" class="link" disabled={at === 0} onClick={() => store.select(all[at - 1])}>
        previous
      </button>
      <button type="button" class="link" disabled={at === all.length - 1} onClick={() => store.select(all[at + 1])}>
        next
      </button>
    </span>
  );
}

export function Selection({ store }: { store: Store }) {
  const span = store.selected.value;
  const { trace } = store;
  const { spans } = trace;
  if (span < 0) {
    return (
      <p class="hint">
        Click a slice for its details and the arrow to its other half; drag with Shift for the totals of a range. <kbd>?</kbd> lists all keys.
      </p>
    );
  }
  const name = trace.names[spans.name[span]];
  const track = trace.tracks[spans.track[span]];
  const color = store.colors.get(name.moduleClass || name.label)!;
  const said = trace.spanArgs[span] ?? {};
  return (
    <>
      <h2 class="chosen">
        <span class="swatch" style={{ background: color.fill }} />
        {name.label}
        {!spans.complete[span] && <span class="badge">incomplete</span>}
      </h2>
      <Path store={store} span={span} />
      {!spans.complete[span] && (
        <p class="note">Its begin or its end was overwritten or never came: the times below are only the part that is known.</p>
      )}
      <dl class="fields">
        <Field name="Class">{name.moduleClass || "–"}</Field>
        <Field name="Phase">{PHASES[spans.phase[span] as 0 | 1 | 2]}</Field>
        <Field name="Duration">{formatDuration(spans.end[span] - spans.start[span])}</Field>
        <Field name="Self">{formatDuration(selfTime(spans, span))}</Field>
        <Field name="Start">{formatMoment(spans.start[span])}</Field>
        <Field name="Unix time">{String(trace.base + BigInt(Math.round(spans.start[span])))} ns</Field>
        <Field name="Call">{spans.call[span]}</Field>
        <Field name="Step">{spans.step[span]}</Field>
        <Field name="Track">{track.name}</Field>
        <Field name="Process">{trace.processes[track.process].name} · pid {trace.processes[track.process].pid}</Field>
        {Object.entries(said).map(([key, value]) => (
          <Field key={key} name={key}>{value}</Field>
        ))}
        <Field name="Other half">
          <Halves store={store} span={span} />
        </Field>
        <Field name="Same slice">
          <Calls store={store} span={span} />
        </Field>
      </dl>
    </>
  );
}
