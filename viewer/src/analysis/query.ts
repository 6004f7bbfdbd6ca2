/**
 * The search language: words in a span's name or path, and terms with a special meaning.
 *
 * | term | spans |
 * |---|---|
 * | `attn` | whose label or fully qualified name contains it, ignoring case |
 * | `/h\.\d+$/` | whose label or fully qualified name matches the regular expression, ignoring case |
 * | `class:Linear` | of a module class that contains the text |
 * | `phase:backward` | in that phase; `phase:gpu` on a GPU |
 * | `>1ms` `<20us` | longer or shorter than that |
 *
 * A span must match all terms.
 */
import { isOfModules, type Name, PHASES, type Trace } from "../trace/trace";

export interface Query {
  /** One function for each term about names. */
  readonly names: readonly ((name: Name) => boolean)[];
  /** Indexes into `PHASES`, or "gpu"; a span must match each of them. */
  readonly phases: readonly (number | "gpu")[];
  readonly longerThanNs: number;
  readonly shorterThanNs: number;
}

/** The query cannot be read; the message says why. */
export class QueryError extends Error {}

const UNIT_NS: Readonly<Record<string, number>> = { ns: 1, us: 1e3, µs: 1e3, μs: 1e3, ms: 1e6, s: 1e9 };
const DURATION = /^([<>])=?(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)(ns|us|µs|μs|ms|s)$/i;
/** An attempt at a duration; a name may also start with `<` or `>`, for example `<lambda>`. */
const DURATION_ATTEMPT = /^[<>]=?(?:$|[\d.+-])/;
/** A regular expression between slashes, which may contain spaces; or any text without spaces. */
const TERM = /\/((?:[^/\\]|\\.)+)\/(?=\s|$)|\S+/g;

function regularExpression(source: string): RegExp {
  try {
    return new RegExp(source, "iu");
  } catch {
    throw new QueryError(`/${source}/ is no regular expression`);
  }
}

function phaseOf(text: string): number | "gpu" {
  const phase = PHASES.findIndex((name) => text && name.startsWith(text));
  if (phase >= 0) return phase;
  if (text === "gpu") return "gpu";
  throw new QueryError(`no phase ${text}: ${PHASES.join(", ")} or gpu`);
}

/** Parse a query; null if it has no terms. */
export function parseQuery(text: string): Query | null {
  const names: ((name: Name) => boolean)[] = [];
  const phases: (number | "gpu")[] = [];
  let longerThanNs = -Infinity;
  let shorterThanNs = Infinity;
  for (const [term, source] of text.matchAll(TERM)) {
    const lower = term.toLowerCase();
    const duration = DURATION.exec(lower);
    if (source !== undefined) {
      const expression = regularExpression(source);
      names.push(({ label, fqn }) => expression.test(label) || expression.test(fqn));
    } else if (duration) {
      const ns = Number(duration[2]) * UNIT_NS[duration[3]];
      if (duration[1] === ">") longerThanNs = Math.max(longerThanNs, ns);
      else shorterThanNs = Math.min(shorterThanNs, ns);
    } else if (DURATION_ATTEMPT.test(term)) {
      throw new QueryError(`${term} is no duration: ${term[0]}1.5ms, with ns, us, ms or s, without spaces`);
    } else if (lower.startsWith("phase:")) {
      phases.push(phaseOf(lower.slice("phase:".length)));
    } else if (lower.startsWith("class:")) {
      const part = lower.slice("class:".length);
      names.push(({ moduleClass }) => moduleClass.toLowerCase().includes(part));
    } else {
      names.push(({ label, fqn }) => `${label}\n${fqn}`.toLowerCase().includes(lower));
    }
  }
  const isEmpty = !names.length && !phases.length && longerThanNs === -Infinity && shorterThanNs === Infinity;
  return isEmpty ? null : { names, phases, longerThanNs, shorterThanNs };
}

/** One flag per span, 1 if it matches; null if the query is null. */
export function matchSpans({ spans, names, tracks }: Trace, query: Query | null): Uint8Array | null {
  if (!query) return null;
  const nameMatches = names.map((name) => query.names.every((matches) => matches(name)));
  const onGpu = tracks.map(({ kind }) => kind === "gpu");
  const ofModules = tracks.map(isOfModules);
  const phaseMatches = tracks.map((_, track) =>
    PHASES.map((_phase, index) =>
      query.phases.every((wanted) => (wanted === "gpu" ? onGpu[track] : ofModules[track] && wanted === index)),
    ),
  );
  const { longerThanNs, shorterThanNs } = query;
  const result = new Uint8Array(spans.count);
  for (let i = 0; i < spans.count; i++) {
    if (!nameMatches[spans.name[i]] || !phaseMatches[spans.track[i]][spans.phase[i]]) continue;
    const duration = spans.end[i] - spans.start[i];
    if (duration > longerThanNs && duration < shorterThanNs) result[i] = 1;
  }
  return result;
}
