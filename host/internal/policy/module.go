package policy

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// Options tell where to find a module, and limit it.
type Options struct {
	Log *slog.Logger
	// Dir is searched for names before the embedded policies; empty for none.
	Dir string
	// Grants are the imports that the operator allows. A module gets a grant if its manifest requests it, too.
	// "wasi-stub" need not be listed: it gives access to nothing (no files, an artificial clock, seeded random
	// numbers).
	Grants []string
	// SHA256 is the digest of the module in hexadecimal; any other module is refused. Empty: any module.
	SHA256 string
	// PublicKey is the key that must have signed the module. A minisign key, its line of base64 or the whole file,
	// verifies <module>.minisig. A PEM of cosign verifies <module>.sig or a signature in the module's artefact. Empty:
	// no signature is needed.
	PublicKey string
	// MemoryPages is the most memory of an instance, in pages of 64 KiB, unless its manifest asks for less. 0: 1,024
	// pages and, for an evict policy, 128 bytes for each slot.
	MemoryPages uint32
	// Memory bounds the memory of all instances that share it; nil for no limit.
	Memory *sandbox.MemoryBudget
	// Fuel bounds the instructions of calls.
	Fuel sandbox.Fuel
	// OnFault is the reaction to a fault. Stop gets the reason to end the host; it must not block.
	OnFault OnFault
	Stop    func(error)
	// Cache stores compiled code; optional.
	Cache *sandbox.Cache

	// Profile collects the fuel of the module's functions. With it, calls are slow and have no limit of time.
	Profile *sandbox.Profile

	// SkipSelfTest loads a module without its self-test, for programs that judge modules themselves.
	SkipSelfTest bool

	cpuClock func() time.Duration // set by tests; nil: the real clock
}

// Module is a policy that was loaded, checked and compiled: the source of instances for its roles. It is safe for
// concurrent use.
type Module struct {
	name     string
	digest   string
	manifest abi.Manifest
	known    bool // the module has a manifest of its own, and settings are checked against it
	roles    [abi.Roles]bool
	log      *slog.Logger
	guard    guard

	pages  uint32 // the operator's limit of memory; 0: the default
	memory *sandbox.MemoryBudget

	make func(guest.Info) (any, error) // makes a native guest; nil for wasm
	code *sandbox.Code                 // nil for a native module
}

// Name returns the manifest's name, or the file's.
func (m *Module) Name() string { return m.name }

// Digest returns the SHA-256 of the module's bytes in hexadecimal, or "native".
func (m *Module) Digest() string { return m.digest }

// Manifest returns the module's manifest. A module without one gets one with its name and roles.
func (m *Module) Manifest() abi.Manifest { return m.manifest }

// Has reports whether the module has the role.
func (m *Module) Has(r abi.Role) bool { return r < abi.Roles && m.roles[r] }

// Counters returns the sums that the module's instances reported through counter_add, by the manifest's names.
func (m *Module) Counters() map[string]int64 {
	if m.code == nil || len(m.manifest.Counters) == 0 {
		return nil
	}
	out := make(map[string]int64, len(m.manifest.Counters))
	for i, name := range m.manifest.Counters {
		out[name] = m.code.Counter(i)
	}
	return out
}

// Close releases the compiled code. Everything made from the module must have been closed before.
func (m *Module) Close(ctx context.Context) error {
	if m.code == nil {
		return nil
	}
	return m.code.Close(ctx)
}

// settings are the settings of a role's instances.
type settings struct {
	role   abi.Role
	config Config
	sandbox.Settings
}

// Limits of a role.
const (
	defaultNamespaces    = 1024
	maxNamespaces        = 1 << 16
	maxSlots             = 1 << 31
	maxNamespaceText     = 1 << 20
	maxConfigText        = 1 << 20
	MaxPath              = 1024 // bytes of a path below a root
	maxPathComponents    = 8
	maxPathComponentSize = 255
)

func (m *Module) prepare(s *settings) error {
	if !m.Has(s.role) {
		return fmt.Errorf("%w: %s has no role %s", ErrRole, m.name, s.role)
	}
	if s.MaxNamespaces = cmp.Or(s.MaxNamespaces, defaultNamespaces); s.MaxNamespaces > maxNamespaces {
		return fmt.Errorf("%w: %s: %d namespaces, at most %d", ErrConfig, m.name, s.MaxNamespaces, maxNamespaces)
	}
	if s.MaxSlots > maxSlots {
		return fmt.Errorf("%w: %s: %d slots, at most %d", ErrConfig, m.name, s.MaxSlots, uint32(maxSlots))
	}
	if !m.known {
		return nil
	}
	return s.config.check(m.name, m.manifest.Config)
}

func (m *Module) instantiate(ctx context.Context, s *settings, u *sandbox.Usage) (*sandbox.Instance, error) {
	text, err := s.config.text()
	if err != nil {
		return nil, err
	}
	s.Config, s.MemoryPages, s.Memory = text, m.pages, m.memory
	return m.code.Instantiate(ctx, &s.Settings, u)
}

func (s *settings) info() guest.Info {
	return guest.Info{
		Features: abi.FeatureHints | abi.FeatureLevels,
		MaxSlots: s.MaxSlots, MaxBatch: sandbox.MaxBatch, MaxVictims: sandbox.MaxVictims, MaxNamespaces: s.MaxNamespaces,
		Capacity: s.Capacity, Seed: s.Seed, Config: guest.Config(s.config),
	}
}
