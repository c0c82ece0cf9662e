package artifact

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvhost/kvhost/host/internal/regular"
)

// Files of an artifact in the local store, in a directory that is called as its manifest's digest.
const (
	manifestFile  = "manifest.json"
	moduleFile    = "module.wasm"
	signatureFile = moduleFile + ".minisig"
)

func place(store, digest string) string {
	return filepath.Join(store, strings.TrimPrefix(digest, "sha256:"))
}

// Open is Read of a text, which must name a digest.
func Open(ctx context.Context, store, module string, maxModule int64) (path string, b []byte, err error) {
	r, err := Pinned(module)
	if err != nil {
		return "", nil, err
	}
	return Read(ctx, store, r, maxModule)
}

// Read takes an artifact from the local store. Every file of it is compared with the digest that the reference names. path is the
// module's; its signature is beside it.
func Read(ctx context.Context, store string, r Reference, maxModule int64) (path string, module []byte, err error) {
	dir := place(store, r.Digest)
	read := func(name string, limit int64) []byte {
		var b []byte
		if err == nil {
			b, err = regular.ReadFile(ctx, filepath.Join(dir, name), limit)
		}
		return b
	}
	b := read(manifestFile, maxManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil, fmt.Errorf("%w: %s has no %s: `kvhost policy pull %s` brings it", ErrAbsent, store, r.Digest, r)
	}
	if err != nil {
		return "", nil, err
	}
	of, signature, err := Layers(r.Digest, b, maxModule)
	if err == nil {
		if module = read(moduleFile, maxModule); err == nil {
			err = of.Check("module", module)
		}
	}
	if err == nil && signature != nil {
		if b := read(signatureFile, MaxSignature); err == nil {
			err = signature.Check("signature", b)
		}
	}
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w; `kvhost policy pull %s` brings it anew", dir, err, r)
	}
	return filepath.Join(dir, moduleFile), module, nil
}

// Write puts an artifact into the local store, if check takes the module's file, and returns the module's path. What is there already
// is replaced only if it was altered.
func Write(ctx context.Context, store string, r Reference, a *Artifact, check func(path string) error) (path string, err error) {
	if err := os.MkdirAll(store, 0o755); err != nil {
		return "", err
	}
	made, err := os.MkdirTemp(store, ".pull-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(made)) }()
	for name, b := range map[string][]byte{manifestFile: a.Manifest, moduleFile: a.Module, signatureFile: a.Signature} {
		if b != nil {
			if err := write(filepath.Join(made, name), b); err != nil {
				return "", err
			}
		}
	}
	if err := errors.Join(ctx.Err(), check(filepath.Join(made, moduleFile)), os.Chmod(made, 0o755)); err != nil { // others run the host
		return "", err
	}
	dir := place(store, a.Digest)
	if path, _, err := Read(ctx, store, r.At(a.Digest), int64(len(a.Module))); err == nil {
		return path, nil
	}
	old := made + ".old"
	if err := os.Rename(dir, old); err == nil {
		defer func() { err = errors.Join(err, os.RemoveAll(old)) }()
	}
	if err := os.Rename(made, dir); err != nil {
		return "", err
	}
	return filepath.Join(dir, moduleFile), syncDir(store)
}

func write(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// DefaultStore is where commands look that are told of no other store.
const DefaultStore = "/var/lib/kvhost/policies"
