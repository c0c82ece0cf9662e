// The kit for kvhost policies in AssemblyScript. abi/SPEC.md is the contract; this package is its records, its imports and
// its exports. A policy registers its functions at the top level, and re-exports what the host calls:
//
//   import { Info, LayoutHeader, Plane, Segment, at, onInit, onLayout } from "kvhost/assembly";
//   export { kvhost_abi_1, kv_buffer, kv_init } from "kvhost/assembly/module";
//   export { kv_layout } from "kvhost/assembly/layout";
//
//   onLayout((header, planes, out, room) => { ... return count; });
//
// Build with --runtime stub --exportStart _initialize: what stands at the top level then runs in _initialize. Objects are
// never freed: make them in onInit or at the top level only.
export * from "./records";
export * from "./host";
export * from "./memory";
export * from "./settings";
export * from "./path";
export { onInit, onNamespace } from "./module";
export { onEvents, onVictims } from "./evict";
export { onAdmit } from "./admit";
export { onPlace } from "./place";
export { onLayout } from "./layout";
export { onSave, onLoad } from "./state";
