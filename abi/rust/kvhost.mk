# Builds a policy in Rust: include this from a Makefile that stands beside Cargo.toml and manifest.json and sets NAME.
export PATH := $(PATH):$(HOME)/.cargo/bin
CARGO  := cargo
TARGET := wasm32-unknown-unknown
SDK    := $(dir $(lastword $(MAKEFILE_LIST)))
OUT    ?= $(NAME).wasm
BUILT  := target/$(TARGET)/release/$(subst -,_,$(NAME)).wasm
export RUSTFLAGS := -C link-arg=--stack-first -C link-arg=-zstack-size=65536

$(OUT): $(wildcard src/*.rs $(SDK)src/*.rs) Cargo.toml manifest.json
	@command -v $(CARGO) >/dev/null || { echo 'missing: cargo (Debian: apt-get install cargo, or https://rustup.rs)'; exit 1; }
	@test -d "$$(rustc --print sysroot)/lib/rustlib/$(TARGET)/lib" || { echo 'missing: Rust for $(TARGET) (rustup target add $(TARGET), or Debian: apt-get install libstd-rust-dev-wasm32)'; exit 1; }
	$(CARGO) build --offline --quiet --release --target $(TARGET)
	@cp $(BUILT) $@
