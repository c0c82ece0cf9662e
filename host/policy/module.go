package policy

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// Options say how a module is found and what it may do.
type Options struct {
	Log *slog.Logger
	// Dir is where names are looked up before the embedded policies; empty for none.
	Dir string
	// Grants the operator allows. A grant is given when the manifest asks for it, too. "wasi-stub" need not be listed:
	// it opens nothing (no files, a clock that stands still, seeded random numbers).
	Grants []string
	// SHA256 of the module's bytes in hexadecimal; another module is refused. Empty for any.
	SHA256 string
	// PublicKey of minisign, its line of base64 or the whole file: the file <module>.minisig must sign the module with it.
	// Empty for none. (A signature inside the module would have to leave itself out, and no tool would verify it.)
	PublicKey string
	// MemoryPages lowers the manifest's limit of 64 KiB pages; 0 leaves it.
	MemoryPages uint32
	// Fuel bounds what calls may execute.
	Fuel Fuel
	// OnFault says what follows a fault. Stop, which must not block, is told why the host should end.
	OnFault OnFault
	Stop    func(error)
	// Cache keeps compiled code; optional.
	Cache *Cache

	// Untried loads a module without a trial: for what judges modules and says more of a bad one than that it was refused.
	Untried bool

	unmetered bool // for benchmarks, as the baseline
}

// Module is a policy that was loaded, checked and compiled: the source of instances for its roles. It is safe for
// concurrent use.
type Module struct {
	name     string
	digest   string
	manifest abi.Manifest
	known    bool // manifest is the module's own: settings are checked against it
	roles    [abi.Roles]bool
	log      *slog.Logger
	lines    lineLimit
	guard    guard

	make   func(guest.Info) (any, error) // native
	code   *code                         // wasm
	ending sync.WaitGroup                // instances that give their memory back
	source source
}

// Name is the manifest's name, or the file's.
func (m *Module) Name() string { return m.name }

// Digest is the SHA-256 of the module's bytes in hexadecimal, or "native".
func (m *Module) Digest() string { return m.digest }

// Manifest describes the module. Without one of its own it holds the name and the roles.
func (m *Module) Manifest() abi.Manifest { return m.manifest }

// Has says whether the module takes the role.
func (m *Module) Has(r abi.Role) bool { return r < abi.Roles && m.roles[r] }

// Close releases the compiled code. Everything made from the module must have been closed before.
func (m *Module) Close(ctx context.Context) error {
	if m.code == nil {
		return nil
	}
	m.ending.Wait()
	return m.code.close(ctx)
}

// settings are what a role's instances are made with.
type settings struct {
	role       abi.Role
	maxSlots   uint32
	namespaces uint32
	capacity   uint64
	seed       uint64
	config     Config
	longer     uint32 // bytes by which records are longer than this version has them; for probes
	bare       bool   // kv_init is not called; for probes
}

// Limits that every instance is told.
const (
	batchSize            = 256 // records in one call
	maxVictims           = 1024
	defaultNamespaces    = 1024
	maxNamespaces        = 1 << 16
	maxSlots             = 1 << 31
	maxNamespaceText     = 1 << 20
	maxConfigText        = 1 << 20
	maxPathBytes         = 1024
	maxPathComponents    = 8
	maxPathComponentSize = 255
)

func (m *Module) prepare(s *settings) error {
	if !m.Has(s.role) {
		return fmt.Errorf("%w: %s has no role %s", ErrRole, m.name, s.role)
	}
	if s.namespaces == 0 {
		s.namespaces = defaultNamespaces
	}
	if s.namespaces > maxNamespaces {
		return fmt.Errorf("%w: %s: %d namespaces, at most %d", ErrConfig, m.name, s.namespaces, maxNamespaces)
	}
	if s.maxSlots > maxSlots {
		return fmt.Errorf("%w: %s: %d slots, at most %d", ErrConfig, m.name, s.maxSlots, uint32(maxSlots))
	}
	if !m.known {
		return nil
	}
	return s.config.check(m.name, m.manifest.Config)
}

func (s *settings) info() guest.Info {
	return guest.Info{
		MaxSlots: s.maxSlots, MaxBatch: batchSize, MaxVictims: maxVictims, MaxNamespaces: s.namespaces,
		Capacity: s.capacity, Seed: s.seed, Config: guest.Config(s.config),
	}
}
