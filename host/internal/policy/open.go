package policy

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
	"github.com/kvhost/kvhost/plugins/dist"
)

// Open loads a module by the path of a .wasm file or of a directory with an artefact, or by the name of an embedded policy
// with or without ".wasm".
func Open(ctx context.Context, name string, opt Options) (*Module, error) {
	f, err := read(ctx, name, &opt)
	if err != nil {
		return nil, err
	}
	return load(ctx, name, f, opt)
}

// label returns the name of a module without a manifest.
func label(name string) string { return strings.TrimSuffix(filepath.Base(name), ".wasm") }

// file is the bytes of a module and their place.
type file struct {
	path     string // empty for an embedded policy
	bytes    []byte
	digest   string    // SHA-256 in hexadecimal
	artefact *artefact // nil for a .wasm file
}

func newFile(path string, b []byte) *file { return &file{path: path, bytes: b, digest: digestOf(b)} }

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// read finds a module's bytes. A name without a slash is looked up in the working directory, in opt.Dir and among the
// embedded policies, in this order.
func read(ctx context.Context, name string, opt *Options) (*file, error) {
	dir := opt.Dir
	places := []string{name}
	bare := filepath.Base(name) == name
	if bare && dir != "" {
		places = append(places, filepath.Join(dir, strings.TrimSuffix(name, ".wasm")+".wasm"))
	}
	for _, path := range places {
		if bare && path == name && !strings.HasSuffix(name, ".wasm") {
			continue // "lru" names a policy, even if there is a directory lru
		}
		b, err := regular.ReadFile(ctx, path, sandbox.MaxModuleBytes)
		if err == nil {
			return newFile(path, b), nil
		}
		if errors.Is(err, regular.ErrNotRegular) {
			f, e := readArtefact(ctx, path)
			if e == nil {
				return f, nil
			}
			if errors.Is(e, ErrArtefact) {
				err = e
			}
		}
		if errors.Is(err, regular.ErrNotRegular) || errors.Is(err, ErrArtefact) || errors.Is(err, regular.ErrTooLarge) {
			return nil, refused(name, err)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("policy: cannot read %s: %w", name, err)
		}
	}
	if bare {
		if b, err := dist.Read(name); err == nil {
			return newFile("", b), nil
		}
		names := "none; `make` builds them"
		if n := dist.Names(); len(n) > 0 {
			names = strings.Join(n, ", ")
		}
		return nil, fmt.Errorf("%w: %s is neither a file nor an embedded policy (embedded: %s); `make plugins` builds others of plugins/ to "+
			"bin/policies: name that as policy_dir or with --policy-dir", ErrNotFound, name, names)
	}
	return nil, fmt.Errorf("%w: no file %s", ErrNotFound, name)
}

func load(ctx context.Context, name string, f *file, opt Options) (*Module, error) {
	m, scan, pages, err := examine(ctx, name, f, &opt)
	if err != nil {
		return nil, refused(name, err)
	}
	if opt.Profile != nil {
		opt.Fuel.Time = time.Hour
	}
	m.code, err = sandbox.Compile(ctx, &sandbox.Source{
		Name: m.name, Digest: m.digest, Bytes: scan.Compilable(), Scan: scan, Roles: m.roles, Pages: pages,
		Limits: opt.Fuel.Limits(m.manifest.Fuel), Counters: len(m.manifest.Counters), Log: m.log, Cache: opt.Cache,
		CPUClock: opt.cpuClock, Profile: opt.Profile,
	})
	if err != nil {
		return nil, refused(name, err)
	}
	if opt.SkipSelfTest || opt.Profile != nil { // a profile contains only the caller's calls
		return m, nil
	}
	if err := m.selfTest(ctx); err != nil {
		return nil, errors.Join(refused(name, err), m.Close(ctx))
	}
	return m, nil
}

// refused returns the error for a module that is not loaded. The module is not blamed if the compiler was killed or
// could not start.
func refused(name string, err error) error {
	if errors.Is(err, sandbox.ErrCompiler) || errors.Is(err, context.Canceled) {
		return fmt.Errorf("policy: %s not compiled: %w", name, err)
	}
	err = sandbox.Shorten(err)
	if errors.Is(err, ErrGrant) {
		return fmt.Errorf("%w (module %s)", err, name)
	}
	return fmt.Errorf("%w: %s: %w", ErrBadModule, name, err)
}

// examine checks a module as far as possible before it is compiled, and returns its most pages of memory.
func examine(ctx context.Context, name string, f *file, opt *Options) (*Module, *sandbox.Scan, uint32, error) {
	m := &Module{name: label(name), digest: f.digest, pages: opt.MemoryPages, memory: opt.Memory}
	m.log = cmp.Or(opt.Log, slog.New(slog.DiscardHandler))
	m.guard.onFault, m.guard.stop = opt.OnFault, opt.Stop
	if err := pinned(ctx, f, opt); err != nil {
		return nil, nil, 0, err
	}
	s, err := sandbox.ScanModule(f.bytes)
	if err != nil {
		return nil, nil, 0, err
	}
	if m.roles, err = s.Verify(); err != nil {
		return nil, nil, 0, err
	}
	if err := m.describe(s); err != nil {
		return nil, nil, 0, err
	}
	m.log = m.log.With("policy", m.name)
	if err := s.CheckGrants(m.manifest, opt.Grants); err != nil {
		return nil, nil, 0, err
	}
	pages := memoryPages(m.manifest, opt.MemoryPages)
	if s.Pages > uint64(pages) {
		return nil, nil, 0, fmt.Errorf("its memory starts at %d pages of 64 KiB, the limit is %d: raise memory_pages in "+
			"the manifest or the configuration", s.Pages, pages)
	}
	return m, s, pages, nil
}

// pinned checks a module against the digest and the public key of the configuration.
func pinned(ctx context.Context, f *file, opt *Options) error {
	if opt.SHA256 != "" && !strings.EqualFold(opt.SHA256, f.digest) {
		return fmt.Errorf("%w: its SHA-256 is %s, wanted is %s", ErrDigest, f.digest, opt.SHA256)
	}
	if opt.PublicKey != "" {
		return verifySignature(ctx, opt.PublicKey, f)
	}
	return nil
}

// memoryPages returns the most pages of memory of an instance of a module.
func memoryPages(manifest abi.Manifest, most uint32) uint32 {
	pages := cmp.Or(manifest.MemoryPages, most, sandbox.DefaultPages)
	return min(pages, cmp.Or(most, pages), abi.MaxMemoryPages)
}

// describe reads the module's manifest, or derives one from the exports.
func (m *Module) describe(s *sandbox.Scan) error {
	var exported []string
	for r, has := range m.roles {
		if has {
			exported = append(exported, abi.Role(r).String())
		}
	}
	if s.Manifest() == nil {
		m.manifest = abi.Manifest{Name: m.name, ABI: abi.Version, Roles: exported}
		return nil
	}
	manifest, err := abi.ParseManifest(s.Manifest())
	if err != nil {
		return err
	}
	if err := manifest.Runs(abi.Release); err != nil {
		return err
	}
	for _, r := range manifest.Roles {
		if role, err := abi.ParseRole(r); err != nil || !m.roles[role] {
			return fmt.Errorf("its manifest names role %s, its exports do not have it (they have: %s)", r,
				strings.Join(exported, ", "))
		}
	}
	if len(manifest.Roles) != len(exported) {
		return fmt.Errorf("its manifest names the roles %s, its exports have %s", strings.Join(manifest.Roles, ", "),
			strings.Join(exported, ", "))
	}
	if _, saves := s.Exports[abi.ExportSave]; manifest.StateFormat != "" && !saves {
		return fmt.Errorf("its manifest names the state format %q, its exports do not have %s and %s", manifest.StateFormat,
			abi.ExportSave, abi.ExportLoad)
	}
	m.manifest, m.name, m.known = manifest, manifest.Name, true
	return nil
}
