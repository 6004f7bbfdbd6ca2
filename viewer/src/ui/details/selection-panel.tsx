/** The details of the selected span. */
import type { ComponentChildren } from "preact";

import { COST_NAMES, formatCost, isCost } from "../../analysis/costs";
import { describePhase } from "../../analysis/describe";
import { colorKey } from "../../color";
import { formatCount, formatDuration, formatMoment } from "../../format";
import type { Store } from "../../store";
import { sameCall } from "../../trace/neighbours";
import { selfTime } from "../../trace/trace";
import { CopyButton } from "../copy-button";

/** Maximum number of listed links to linked spans; for the others only their number is shown. */
const MAX_LINKS = 12;

function Field({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div class="field">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** The spans around the selected one, outermost first, and the fully qualified name. */
function Ancestors({ store, span }: { store: Store; span: number }) {
  const { spans, names } = store.trace;
  const ancestors: number[] = [];
  for (let outer = spans.parent[span]; outer >= 0; outer = spans.parent[outer]) ancestors.unshift(outer);
  return (
    <nav class="path" aria-label="Spans around it">
      {ancestors.map((outer) => (
        <button key={outer} type="button" class="link" onClick={() => store.select(outer)}>
          {names[spans.name[outer]].label}
        </button>
      ))}
      <span>{names[spans.name[span]].fqn}</span>
    </nav>
  );
}

function LinkedSpans({ store, span }: { store: Store; span: number }) {
  const { spans, tracks } = store.trace;
  const others = store.linkedSpans(span).filter((other) => other !== span);
  if (!others.length) return <>none</>;
  return (
    <span class="links">
      {others.slice(0, MAX_LINKS).map((other) => (
        <button key={other} type="button" class="link" onClick={() => store.select(other)}>
          {tracks[spans.track[other]].kind} at {formatMoment(spans.start[other])}
        </button>
      ))}
      {others.length > MAX_LINKS && ` and ${formatCount(others.length - MAX_LINKS)} more`}
    </span>
  );
}

function SameCalls({ store, span }: { store: Store; span: number }) {
  const { calls, position } = sameCall(store.trace.spans, span);
  return (
    <span class="links">
      {formatCount(position + 1)} of {formatCount(calls.length)}
      <button type="button" class="link" disabled={position === 0} onClick={() => store.select(calls[position - 1])}>
        previous
      </button>
      <button
        type="button"
        class="link"
        disabled={position === calls.length - 1}
        onClick={() => store.select(calls[position + 1])}
      >
        next
      </button>
    </span>
  );
}

export function SelectionPanel({ store }: { store: Store }) {
  const span = store.selected.value;
  const { trace } = store;
  const { spans } = trace;
  if (span < 0) {
    return (
      <p class="hint">
        Click a span for its details and the flow to its backward or forward; drag with Shift for the totals of a range.{" "}
        <kbd>?</kbd> lists all keys.
      </p>
    );
  }
  const { label, fqn, moduleClass } = trace.names[spans.name[span]];
  const track = trace.tracks[spans.track[span]];
  const process = trace.processes[track.process];
  return (
    <>
      <div class="selection-head">
        <h2 class="selection-title">
          <span
            class="color-swatch"
            style={{ background: store.classColors.get(colorKey({ label, moduleClass }))?.fill }}
          />
          {label}
          {!spans.complete[span] && <span class="badge">incomplete</span>}
        </h2>
        <CopyButton text={() => fqn || label} label="Copy name" />
      </div>
      <Ancestors store={store} span={span} />
      {!spans.complete[span] && (
        <p class="note">
          Its start or its end was overwritten or never came: the times below are only the part that is known.
        </p>
      )}
      <dl class="fields">
        <Field name="Class">{moduleClass || "–"}</Field>
        <Field name="Phase">{describePhase(trace, span)}</Field>
        <Field name="Duration">{formatDuration(spans.end[span] - spans.start[span])}</Field>
        <Field name="Self">{formatDuration(selfTime(spans, span))}</Field>
        {store.colorings.filter(isCost).map((cost) => (
          <Field key={cost} name={COST_NAMES[cost]}>
            {formatCost(cost, store.costs[cost].value[span])}
          </Field>
        ))}
        <Field name="Start">{formatMoment(spans.start[span])}</Field>
        {!trace.comparison && (
          <Field name="Unix time">{String(trace.base + BigInt(Math.round(spans.start[span])))} ns</Field>
        )}
        <Field name="Call">{spans.call[span]}</Field>
        <Field name="Step">{spans.step[span]}</Field>
        <Field name="Track">{track.name}</Field>
        <Field name="Process">
          {process.name} · pid {process.pid}
        </Field>
        {Object.entries(trace.spanArgs[span] ?? {}).map(([key, value]) => (
          <Field key={key} name={key}>
            {value}
          </Field>
        ))}
        <Field name="Linked spans">
          <LinkedSpans store={store} span={span} />
        </Field>
        <Field name="Same call">
          <SameCalls store={store} span={span} />
        </Field>
      </dl>
    </>
  );
}
