// Settings stand behind Info as lines "key=value\n".
import { Info } from "./records";

// setting finds a value and answers its address; its length is then in settingLen. 0 when the key is missing.
export let settingLen: u32 = 0;

export function setting(info: Info, key: string): usize {
  let p = changetype<usize>(info) + info.size;
  const end = p + info.configLen;
  const k = <usize>key.length;
  while (p < end) {
    const start = p;
    while (p < end && load<u8>(p) != 10) p++;
    if (p - start > k && load<u8>(start + k) == 61) {
      let i: usize = 0;
      while (i < k && load<u8>(start + i) == key.charCodeAt(<i32>i)) i++;
      if (i == k) {
        settingLen = <u32>(p - start - k - 1);
        return start + k + 1;
      }
    }
    p++;
  }
  return 0;
}

// settingNumber is a setting's value, initial when it is missing, or -1 when it is no whole number.
export function settingNumber(info: Info, key: string, initial: i64): i64 {
  const p = setting(info, key);
  if (!p) return initial;
  if (settingLen == 0 || settingLen > 18) return -1;
  let v: i64 = 0;
  for (let i: u32 = 0; i < settingLen; i++) {
    const c = load<u8>(p + i);
    if (c < 48 || c > 57) return -1;
    v = v * 10 + (c - 48);
  }
  return v;
}
