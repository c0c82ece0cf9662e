// The exports of a policy that keeps state. The manifest's state_format names its form.
import { BAD_INPUT, BUFFER_STATE, DEFAULT, NO_SPACE } from "./records";
import { bufferAt, bufferSize, pack } from "./memory";

let save: ((out: usize, limit: u32) => u32) | null = null;
let load_: ((state: usize, len: u32) => bool) | null = null;

// onSave: writes the state and answers its length; more than limit is a fault.
export function onSave(f: (out: usize, limit: u32) => u32): void { save = f; }
// onLoad: takes a state over; false leaves the policy as new.
export function onLoad(f: (state: usize, len: u32) => bool): void { load_ = f; }

export function kv_save(limit: u32): u64 {
  const f = save;
  if (!f || limit > bufferSize(BUFFER_STATE)) return pack(BAD_INPUT, 0);
  const n = f(bufferAt(BUFFER_STATE), limit);
  return n > limit ? pack(NO_SPACE, 0) : pack(0, n);
}

export function kv_load(len: u32): i32 {
  const f = load_;
  if (!f || len > bufferSize(BUFFER_STATE)) return BAD_INPUT;
  return f(bufferAt(BUFFER_STATE), len) ? 0 : DEFAULT;
}
