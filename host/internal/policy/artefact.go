package policy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
)

// Media types of a module in a registry, and of the payload that cosign signs for it.
const (
	wasmConfigType = "application/vnd.wasm.config.v0+json"
	wasmLayerType  = "application/wasm"
	cosignType     = "application/vnd.dev.cosign.simplesigning.v1+json"
)

// Bounds of what is read before anything is verified.
const (
	maxIndex     = 256 << 10 // bytes of the index, and of each manifest
	maxManifests = 16
)

// artefact is a directory with an OCI image layout that holds one module, and cosign's signatures of it. Registries are
// not asked: `cosign save` makes the directory, and so do other tools.
type artefact struct {
	dir        string
	manifest   string       // digest of the module's manifest, which is what is signed
	signatures []descriptor // of payloads
}

type descriptor struct {
	MediaType, Digest string
	Annotations       map[string]string
}

// ociManifest is an index, or what an index lists.
type ociManifest struct {
	Config            descriptor
	Layers, Manifests []descriptor
}

// readArtefact finds the module. The error is an ErrArtefact if the directory has an index.
func readArtefact(ctx context.Context, dir string) (*file, error) {
	a, index := &artefact{dir: dir}, ociManifest{}
	text, err := regular.ReadFile(ctx, filepath.Join(dir, "index.json"), maxIndex)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, fmt.Errorf("%w: index.json: %w", ErrArtefact, err)
	}
	if len(index.Manifests) > maxManifests {
		return nil, fmt.Errorf("%w: %d manifests, at most %d", ErrArtefact, len(index.Manifests), maxManifests)
	}
	var module []byte
	for _, d := range index.Manifests {
		var m ociManifest
		text, err := a.blob(ctx, d.Digest, maxIndex)
		if err == nil {
			err = json.Unmarshal(text, &m)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: manifest %s: %w", ErrArtefact, d.Digest, err)
		}
		if m.Config.MediaType != wasmConfigType {
			a.signatures = append(a.signatures, m.Layers...)
			continue
		}
		at := slices.IndexFunc(m.Layers, func(l descriptor) bool { return l.MediaType == wasmLayerType })
		if at < 0 || module != nil {
			return nil, fmt.Errorf("%w: want one manifest with the config %s, and a layer %s in it", ErrArtefact, wasmConfigType, wasmLayerType)
		}
		a.manifest = d.Digest
		if module, err = a.blob(ctx, m.Layers[at].Digest, sandbox.MaxModuleBytes); err != nil {
			return nil, fmt.Errorf("%w: the module: %w", ErrArtefact, err)
		}
	}
	if module == nil {
		return nil, fmt.Errorf("%w: no manifest has the config %s", ErrArtefact, wasmConfigType)
	}
	f := newFile(dir, module)
	f.artefact = a
	return f, nil
}

// blob reads what a digest is of.
func (a *artefact) blob(ctx context.Context, digest string, most int64) ([]byte, error) {
	hex, ok := strings.CutPrefix(digest, "sha256:")
	if !ok || len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "" {
		return nil, fmt.Errorf("%w: digest %q: want sha256: and 64 hexadecimal digits", ErrArtefact, digest)
	}
	b, err := regular.ReadFile(ctx, filepath.Join(a.dir, "blobs", "sha256", hex), most)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: it lacks blob %s", ErrArtefact, digest)
	}
	if err == nil && digestOf(b) != hex {
		err = fmt.Errorf("%w: blob %s has the SHA-256 %s", ErrArtefact, digest, digestOf(b))
	}
	return b, err
}

// signed are the payloads that name the module's manifest, and their signatures.
func (a *artefact) signed(ctx context.Context) (list []signature, err error) {
	for _, d := range a.signatures {
		var p struct {
			Critical struct {
				Type  string
				Image struct {
					Digest string `json:"docker-manifest-digest"`
				}
			}
		}
		if d.MediaType != cosignType {
			continue
		}
		payload, err := a.blob(ctx, d.Digest, maxSignature)
		if err == nil {
			err = json.Unmarshal(payload, &p)
		}
		if err != nil {
			return nil, err
		}
		if c := &p.Critical; c.Type == "cosign container image signature" && c.Image.Digest == a.manifest {
			list = append(list, signature{payload, d.Annotations["dev.cosignproject.cosign/signature"]})
		}
	}
	return list, nil
}
