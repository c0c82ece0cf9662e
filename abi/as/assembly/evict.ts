// The exports of the role evict.
import { Ask, BAD_INPUT, BUFFER_ARGS, BUFFER_EVENTS, BUFFER_RESULT, Event } from "./records";
import { bufferAt, bufferSize, pack, together } from "./memory";

let events: ((batch: usize, n: u32) => void) | null = null;
let victims: ((ask: Ask, most: u32, out: usize) => u32) | null = null;

// onEvents: applies n events, at<Event>(batch, i).
export function onEvents(f: (batch: usize, n: u32) => void): void { events = f; }
// onVictims: writes at most `most` slots, u32 each, to out, best victim first; answers how many.
export function onVictims(f: (ask: Ask, most: u32, out: usize) => u32): void { victims = f; }

export function kv_events(n: u32, stride: u32): i32 {
  const f = events, batch = bufferAt(BUFFER_EVENTS);
  if (!f || !together(batch, bufferSize(BUFFER_EVENTS), n, stride, offsetof<Event>())) return BAD_INPUT;
  f(batch, n);
  return 0;
}

export function kv_step(n: u32, stride: u32): u64 {
  const f = victims;
  if (!f || bufferSize(BUFFER_ARGS) < <u32>offsetof<Ask>()) return pack(BAD_INPUT, 0);
  if (n) {
    const status = kv_events(n, stride);
    if (status) return pack(status, 0);
  }
  const ask = changetype<Ask>(bufferAt(BUFFER_ARGS));
  return pack(0, f(ask, min(ask.maxVictims, bufferSize(BUFFER_RESULT) >> 2), bufferAt(BUFFER_RESULT)));
}
