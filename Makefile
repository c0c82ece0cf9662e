# kvhost: `make run` and `make test` are all a newcomer needs; `make help` lists the rest.

SHELL       := /bin/bash
GO          ?= go
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
TOOLS       := $(CURDIR)/.build/bin
STATICCHECK := $(TOOLS)/staticcheck
LDFLAGS     := -s -w -X main.version=$(VERSION)

# Packages with goroutines of their own; the race detector needs a C compiler.
RACE := ./gds/... ./staging/... ./host/...
# Compiles every module twice and plays it: minutes under the detector, and one goroutine.
SLOW := TestWasmDecidesAsNative|TestFirstParty|TestBroken|TestBench$$
# How long each part of make torture goes on.
TORTURE ?= 10m
KILLS   ?= 500

# What vendors' languages need. Rust's own installer keeps its tools where no PATH looks.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: all help plugins examples kits build run test test-python bench curves check generate tools clean

all: build ## policies to plugins/dist, then bin/kvhost with them embedded

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

plugins: ## build every first-party policy to plugins/dist, compressed
	$(GO) run ./plugins/dist/build

examples: plugins ## build the vendors' plugins in C, Rust and AssemblyScript, to examples/plugins/*/*.wasm
	@for dir in $(dir $(wildcard examples/plugins/*/Makefile)); do $(MAKE) --no-print-directory -C $$dir || exit 1; done

build: plugins
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/kvhost ./cmd/kvhost

run: build ## the main job: replay a trace through a real host, policy in wasm, chunks on disk
	bin/kvhost replay --embedded --trace examples/traces/mixed.jsonl.zst --policy lru.wasm --capacity 1000 --sessions 2

test: plugins examples ## all tests, the concurrent packages under the race detector
	@test -x abi/as/node_modules/.bin/asc || { echo 'missing: abi/as/node_modules (make kits)'; exit 1; }
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) test ./abi/... ./plugins/... ./cmd/... ./examples/...
	CGO_ENABLED=0 $(GO) test -run '$(SLOW)' ./host/sim ./host/policy/plugintest
	CGO_ENABLED=1 $(GO) test -race -timeout 14m -skip '$(SLOW)' $(RACE)

# What the Python client needs, from the network, once; the client itself stays where it is.
.venv/installed: host/client/python/pyproject.toml
	@python3 -c 'import ensurepip' || { echo 'missing: python3 with venv (Debian: apt-get install python3-venv)'; exit 1; }
	python3 -m venv .venv
	.venv/bin/pip install --quiet --editable './host/client/python[test]'
	touch $@

test-python: build .venv/installed ## the Python client's tests against a real host, in a virtual environment of their own
	@dir=$$(mktemp -d); bin/kvhost --root $$dir/kv=1GiB --socket $$dir/s --http-listen '' & host=$$!; \
	  trap "kill $$host; wait $$host; rm -rf $$dir" EXIT; \
	  for i in $$(seq 100); do test -S $$dir/s && break; sleep 0.1; done; \
	  KVHOST_SOCKET=$$dir/s .venv/bin/python -m pytest -q host/client/python

torture: plugins ## random histories, power losses and kill -9 for TORTURE each (10m) and KILLS rounds (500); failing seeds are printed
	CGO_ENABLED=1 $(GO) test -race -timeout 0 -run 'TestRandomHistories' ./host/store -history.time $(TORTURE)
	$(GO) test -timeout 0 -run 'TestPowerLoss' ./host/store -power.time $(TORTURE)
	$(GO) test -timeout 0 -run TestKillRounds ./cmd/kvhost -kill.rounds $(KILLS)

bench: plugins ## benchmarks, each beside its baseline in the same run
	$(GO) test -run '^$$' -bench . -benchtime 1x ./...

curves: build ## redraw the README's miss-ratio curves from the generated trace
	bin/kvhost sim --quiet --trace examples/traces/mixed.jsonl.zst --capacity 1%,2%,5%,10%,20%,30%,50% --plot examples/curves.svg \
	  --policy fifo.wasm --policy lru.wasm --policy arc.wasm --policy prefix.wasm --policy belady

check: generate ## format, vet, staticcheck, import direction, tidy and generated files leave a clean tree
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo 'gofmt these files'; exit 1; }
	$(GO) vet ./...
	GOOS=wasip1 GOARCH=wasm $(GO) vet ./abi/guest/... ./plugins/...
	$(STATICCHECK) ./...
	$(GO) test -run 'TestImportDirection|TestTopLevel' ./host
	GOARCH=arm64 CGO_ENABLED=0 $(GO) build ./...
	$(GO) mod tidy -diff
	@git diff --exit-code -- . || { echo 'make check left the tree changed: commit what it generated'; exit 1; }

generate: ## regenerate what is generated (protobuf stubs)
	$(GO) generate ./host/proto/...

kits: ## install what policies in C, Rust and AssemblyScript are built with, or name it; make test needs it
	@command -v clang >/dev/null || { echo 'missing: clang, for policies in C (Debian: apt-get install clang)'; exit 1; }
	@command -v wasm-ld >/dev/null || { echo 'missing: wasm-ld, for policies in C (Debian: apt-get install lld)'; exit 1; }
	@command -v cargo >/dev/null || { echo 'missing: cargo, for policies in Rust (Debian: apt-get install cargo libstd-rust-dev-wasm32)'; exit 1; }
	@command -v npm >/dev/null || { echo 'missing: npm, for policies in AssemblyScript (Debian: apt-get install npm)'; exit 1; }
	@test -d "$$(rustc --print sysroot)/lib/rustlib/wasm32-unknown-unknown/lib" || rustup target add wasm32-unknown-unknown || \
	  { echo 'missing: Rust for wasm32-unknown-unknown (Debian: apt-get install libstd-rust-dev-wasm32)'; exit 1; }
	npm ci --silent --no-audit --no-fund --prefix abi/as

tools: kits ## install the tools that check and generate need; names what it cannot install
	@mkdir -p $(TOOLS)
	GOBIN=$(TOOLS) $(GO) install honnef.co/go/tools/cmd/staticcheck@v0.8.2
	@command -v protoc >/dev/null || echo 'missing: protoc (Debian: apt-get install protobuf-compiler)'
	@command -v cc >/dev/null || echo 'missing: a C compiler, for go test -race (Debian: apt-get install gcc)'

clean: ## remove what make built
	rm -rf bin .build plugins/dist/*.wasm plugins/dist/*.wasm.zst
