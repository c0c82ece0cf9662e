// What every module exports.
import { ABI, BAD_INPUT, BUFFER_INFO, Info } from "./records";
import { buffer, bufferAt, bufferSize } from "./memory";

let init: ((info: Info) => i32) | null = null;
let namespace_: ((id: u32, text: usize, len: u32) => i32) | null = null;

// onInit: reads settings, allocates, answers a status. Info and the settings behind it are valid during the call.
export function onInit(f: (info: Info) => i32): void { init = f; }
// onNamespace: a namespace's text, valid during the call; answers a status.
export function onNamespace(f: (id: u32, text: usize, len: u32) => i32): void { namespace_ = f; }

export function kvhost_abi_1(): void {}

export function kv_buffer(kind: u32, len: u32): usize { return buffer(kind, len); }

export function kv_init(len: u32): i32 {
  if (len < offsetof<Info>() || len > bufferSize(BUFFER_INFO)) return BAD_INPUT;
  const info = changetype<Info>(bufferAt(BUFFER_INFO));
  if (info.abi != ABI || info.size < <u32>offsetof<Info>() || <u64>info.size + info.configLen > len) return BAD_INPUT;
  const f = init;
  return f ? f(info) : 0;
}

export function kv_namespace(id: u32, len: u32): i32 {
  if (len > bufferSize(BUFFER_INFO)) return BAD_INPUT;
  const f = namespace_;
  return f ? f(id, bufferAt(BUFFER_INFO), len) : 0;
}
