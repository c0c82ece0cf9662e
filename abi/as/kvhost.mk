# Builds a policy in AssemblyScript: include this from a Makefile that stands beside NAME.ts and manifest.json and sets NAME.
# asc cannot write custom sections: kvhost puts the manifest in.
SDK    := $(dir $(lastword $(MAKEFILE_LIST)))
ASC    ?= $(SDK)node_modules/.bin/asc
KVHOST ?= kvhost
OUT    ?= $(NAME).wasm

$(OUT): $(NAME).ts manifest.json $(wildcard $(SDK)assembly/*.ts)
	@test -x $(ASC) || { echo 'missing: $(ASC) (Debian: apt-get install npm, then npm ci --prefix $(SDK))'; exit 1; }
	$(ASC) $< -O3 --runtime stub --exportStart _initialize --use abort=$(SDK)assembly/host/kvAbort -o $@.part
	@command -v $(firstword $(KVHOST)) >/dev/null || { echo 'missing: $(KVHOST); say where it is: make KVHOST=/path/to/kvhost'; exit 1; }
	$(KVHOST) policy pack $@.part --manifest manifest.json
	@mv $@.part $@
