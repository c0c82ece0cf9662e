# Builds a policy in C: include this from a Makefile that stands beside NAME.c and manifest.json and sets NAME.
CC     := clang
SDK    := $(dir $(lastword $(MAKEFILE_LIST)))
OUT    ?= $(NAME).wasm
CFLAGS := --target=wasm32 -O2 -mbulk-memory -nostdlib -ffreestanding -fno-builtin -Wall -Wextra -Werror -I$(SDK) -I.
LINK   := -Wl,--no-entry -Wl,--stack-first -Wl,-z,stack-size=65536 -Wl,--strip-debug

$(OUT): $(NAME).c manifest.json $(SDK)kvhost.h
	@command -v $(CC) >/dev/null || { echo 'missing: $(CC) (Debian: apt-get install clang lld)'; exit 1; }
	@command -v wasm-ld >/dev/null || { echo 'missing: wasm-ld (Debian: apt-get install lld)'; exit 1; }
	$(CC) $(CFLAGS) $(LINK) -o $@ $<
