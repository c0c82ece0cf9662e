/* admit_release01.wasm, built with the C kit of ABI release 0.1, whose candidates had 56 bytes:
 *
 *   clang --target=wasm32 -Os -mbulk-memory -nostdlib -ffreestanding -Wl,--no-entry -Wl,--strip-all -I KIT -o OUT THIS
 *
 * It admits what has an odd key and a time that is a multiple of three, so that each answer follows from the first and the
 * last field of its record. */
#include "kvhost.h"

static int32_t init(const kv_info *info) { return info->abi == 1 ? KV_OK : KV_BAD_INPUT; }

static void admit(const kv_candidate *batch, uint32_t n, uint8_t *out) {
  for (uint32_t i = 0; i < n; i++) out[i] = batch[i].key % 2 == 1 && batch[i].time % 3 == 0;
}

KV_MODULE(init)
KV_ADMIT(admit)
__asm__(".section .custom_section.kvhost.manifest,\"\",@\n"
        ".ascii \"{\\\"name\\\":\\\"odd\\\",\\\"abi\\\":1,\\\"roles\\\":[\\\"admit\\\"],\\\"min_host\\\":\\\"0.1\\\"}\"\n");
