/** A name of the browser, such as `window` or `Node`, means the browser's object everywhere in this source. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parseSync } from "vite";
import { expect, test } from "vitest";

/**
 * Names that locals may have anyway: `event` is the usual argument of handlers, and the DOM's own `name` has the type
 * void so that it is not used by mistake.
 */
const ALLOWED = new Set(["event", "name"]);

const VIEWER = join(import.meta.dirname, "../..");
const DOM_TYPES = `node_modules/@typescript/typescript-${process.platform}-${process.arch}/lib/lib.dom.d.ts`;

interface AstNode {
  readonly type: string;
  readonly [field: string]: unknown;
}

const isNode = (value: unknown): value is AstNode => typeof value === "object" && value !== null && "type" in value;

const childrenOf = (node: AstNode): AstNode[] => Object.values(node).flat().filter(isNode);

/** The names that a binding pattern declares: `a`, `{ a, b: c }`, `[a, b = 1]`, `...a`. */
function patternNames(pattern: unknown): string[] {
  if (!isNode(pattern)) return [];
  switch (pattern.type) {
    case "Identifier":
      return [pattern.name as string];
    case "ObjectPattern":
      return (pattern.properties as AstNode[]).flatMap((property) => patternNames(property.value ?? property.argument));
    case "ArrayPattern":
      return (pattern.elements as unknown[]).flatMap(patternNames);
    case "AssignmentPattern":
      return patternNames(pattern.left);
    case "RestElement":
      return patternNames(pattern.argument);
    case "TSParameterProperty":
      return patternNames(pattern.parameter);
    default:
      return [];
  }
}

/** The names that a node itself declares, in any scope. */
function declaredBy(node: AstNode): string[] {
  switch (node.type) {
    case "FunctionDeclaration":
    case "FunctionExpression":
    case "ArrowFunctionExpression":
      return [node.id, ...(node.params as unknown[])].flatMap(patternNames);
    case "VariableDeclarator":
    case "ClassDeclaration":
    case "TSInterfaceDeclaration":
    case "TSTypeAliasDeclaration":
    case "TSDeclareFunction":
      return patternNames(node.id);
    case "ImportSpecifier":
    case "ImportDefaultSpecifier":
      return patternNames(node.local);
    case "CatchClause":
      return patternNames(node.param);
    default:
      return [];
  }
}

const declaredIn = (node: AstNode): string[] => [...declaredBy(node), ...childrenOf(node).flatMap(declaredIn)];

function parse(path: string): AstNode {
  const { program, errors } = parseSync(path, readFileSync(join(VIEWER, path), "utf8"));
  expect(errors, path).toEqual([]);
  return program as unknown as AstNode;
}

test("declaredIn of a source finds every kind of declaration", () => {
  const code = `import { a as b } from "x"; interface C {} type D = number; class E {}
    function f(g: number, { h, i: j }: C, [k = 1, ...l]: D[]) { try { const m = (n) => 1; } catch (o) {} }`;
  const names = declaredIn(parseSync("code.ts", code).program as unknown as AstNode);
  expect(names.sort()).toEqual(["C", "D", "E", "b", "f", "g", "h", "j", "k", "l", "m", "n", "o"]);
});

test("no declaration in the source shadows a name of the DOM", { timeout: 60_000 }, () => {
  const domNames = new Set(
    childrenOf(parse(DOM_TYPES)).flatMap((node) => [node, ...childrenOf(node)].flatMap(declaredBy)),
  );
  expect(domNames.has("window") && domNames.has("Node") && domNames.has("scroll")).toBe(true);
  const files = readdirSync(join(VIEWER, "src"), { recursive: true, encoding: "utf8" })
    .filter((file) => /\.tsx?$/.test(file))
    .map((file) => join("src", file));
  expect(files.length).toBeGreaterThan(40);
  const shadowing = files.flatMap((file) =>
    declaredIn(parse(file))
      .filter((name) => domNames.has(name) && !ALLOWED.has(name))
      .map((name) => `${file}: ${name}`),
  );
  expect(shadowing).toEqual([]);
});
