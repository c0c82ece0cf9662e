// What a guest can ask of the host. An import that is not called is not linked, so no grant is needed for it.
import { BAD_INPUT } from "./records";

@external("kvhost_1", "log_enabled") declare function hostLogEnabled(level: i32): i32;
@external("kvhost_1", "log") declare function hostLog(level: i32, ptr: usize, len: u32): void;
@external("kvhost_1", "fail") declare function hostFail(ptr: usize, len: u32): void;
@external("kvhost_1", "now_ns") export declare function nowNs(): u64; // grant "clock"
@external("kvhost_1", "counter_add") export declare function counterAdd(id: u32, delta: i64): void; // grant "metrics"
@external("kvhost_1", "rand_u64") export declare function randU64(): u64; // grant "random"

const line = memory.data(1024, 16);

// ascii writes a text's characters as bytes: lines are made to be read by operators, in letters that all consoles have.
function ascii(text: string): u32 {
  const n = min(text.length, 1024);
  for (let i = 0; i < n; i++) {
    const c = text.charCodeAt(i);
    store<u8>(line + i, c < 128 ? <u8>c : 63);
  }
  return n;
}

export function logEnabled(level: i32): bool { return hostLogEnabled(level) != 0; }

export function log(level: i32, text: string): void {
  hostLog(level, line, ascii(text));
}

// fail gives the words for the negative status that follows, and is one.
export function fail(text: string): i32 {
  hostFail(line, ascii(text));
  return BAD_INPUT;
}

// kvAbort is what assert, and an index out of range, become: --use abort=... names it.
export function kvAbort(message: string | null, file: string | null, row: u32, column: u32): void {
  hostFail(line, ascii(message ? message : "abort"));
  unreachable();
}
