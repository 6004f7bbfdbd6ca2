// Perfetto's trace processor (the WASM of its UI) under Node, as a server on stdin and stdout.
// A request is a little-endian u32 length and that many bytes of TraceProcessorRpcStream; an answer is a byte
// (0: all is well, 1: the rest is an error message), a u32 length and that many bytes.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const write = (bytes) => {
  for (let done = 0; done < bytes.length; ) {
    try {
      done += fs.writeSync(1, bytes, done);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error; // a full pipe: the reader will empty it
    }
  }
};
const answer = (status, bytes) => {
  const head = Buffer.alloc(5);
  head.writeUInt8(status, 0);
  head.writeUInt32LE(bytes.length, 1);
  write(head);
  write(bytes);
};
const read = (length) => {
  const bytes = Buffer.alloc(length);
  for (let done = 0; done < length; ) {
    const got = fs.readSync(0, bytes, done, length - done, null);
    if (got === 0) process.exit(0); // the tests are over
    done += got;
  }
  return bytes;
};

// The bundle is made for a web worker: look like one, hand it the WASM, and learn when it is ready.
const patch = (source, from, to) => {
  if (!source.includes(from)) throw new Error(`this engine_bundle.js has no ${from}`);
  return source.replaceAll(from, to);
};
let source = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
source = patch(source, '"string"==typeof process.versions.node', "false");
source = patch(source, "locateFile:e=>e,print", "locateFile:e=>e,wasmBinary:globalThis.__wasm,print");
source = patch(source, "onRuntimeInitialized:()=>e.resolve()", "onRuntimeInitialized:()=>{e.resolve();setTimeout(__ready,0)}");
// From Node 24 on there is memory of 64 bits, for which the bundle has another file than the one it is handed.
source = source.replaceAll("try{return new WebAssembly.Module(e),!0}catch(e){return!1}", "return!1");
globalThis.__wasm = fs.readFileSync(path.join(folder, "trace_processor.wasm"));
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "file:///engine/" };
console.log = console.error; // stdout carries answers only
globalThis.__ready = () => {
  let replies = [];
  const port = { postMessage: (bytes) => replies.push(bytes) };
  globalThis.onmessage({ data: port });
  answer(0, Buffer.from("ready"));
  for (;;) {
    const request = read(read(4).readUInt32LE(0));
    try {
      port.onmessage({ data: new Uint8Array(request) });
      answer(0, Buffer.concat(replies));
    } catch (error) {
      answer(1, Buffer.from(String(error)));
      process.exit(1); // a crashed WASM module answers nothing more
    }
    replies = [];
  }
};
vm.runInThisContext(source, { filename: "engine_bundle.js" });
