package policy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
)

// Media types of a module in a registry and of its signed payloads: the payload of cosign 2, and the statement that
// cosign 3 puts into an envelope.
const (
	wasmConfigType = "application/vnd.wasm.config.v0+json"
	wasmLayerType  = "application/wasm"
	cosignType     = "application/vnd.dev.cosign.simplesigning.v1+json"
	cosignSigns    = "https://sigstore.dev/cosign/sign/v1"
)

// Bounds of data that is read before it is verified.
const (
	maxIndex = 256 << 10 // bytes of the index, of each manifest and of each bundle
	maxBlobs = 64        // also the number of signatures of the module
)

// artefact is a directory with an OCI image layout that holds one module, and cosign's signatures of it. No registry is
// contacted: `cosign save` and other tools make the directory.
type artefact struct {
	dir      string
	manifest string // digest of the module's manifest, which the signatures sign
}

type descriptor struct {
	MediaType, Digest string
	Annotations       map[string]string
}

// document is an index, an entry of an index, or a bundle of cosign 3.
type document struct {
	Config            descriptor
	Layers, Manifests []descriptor
	Envelope          struct { // a DSSE envelope
		Payload     []byte
		PayloadType string
		Signatures  []struct{ Sig string }
	} `json:"dsseEnvelope"`
}

// readArtefact reads the module of an artefact. The error is an ErrArtefact if the directory has an index.
func readArtefact(ctx context.Context, dir string) (*file, error) {
	a, index := &artefact{dir: dir}, document{}
	text, err := regular.ReadFile(ctx, filepath.Join(dir, "index.json"), maxIndex)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, fmt.Errorf("%w: index.json: %w", ErrArtefact, err)
	}
	if len(index.Manifests) > maxBlobs {
		return nil, fmt.Errorf("%w: %d manifests, at most %d", ErrArtefact, len(index.Manifests), maxBlobs)
	}
	var module []byte
	for _, d := range index.Manifests {
		var m document
		text, err := a.blob(ctx, d.Digest, maxIndex)
		if err == nil {
			err = json.Unmarshal(text, &m)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: manifest %s: %w", ErrArtefact, d.Digest, err)
		}
		if m.Config.MediaType != wasmConfigType {
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

// blob reads the content with a digest.
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

// signed returns the payloads that name the module's manifest, and their signatures. It reads all blobs, since cosign 3
// saves its bundles, which refer to the module, without listing them. Only the module may be longer than a manifest.
func (a *artefact) signed(ctx context.Context) (list []signature, err error) {
	entries, err := os.ReadDir(filepath.Join(a.dir, "blobs", "sha256"))
	if err != nil || len(entries) > maxBlobs {
		return nil, fmt.Errorf("%w: %d blobs, want at most %d (%v)", ErrArtefact, len(entries), maxBlobs, err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrArtefact, err)
		} else if info.Size() > maxIndex {
			continue
		}
		text, err := a.blob(ctx, "sha256:"+e.Name(), maxIndex)
		if err != nil {
			return nil, err
		}
		var b document
		if json.Unmarshal(text, &b) != nil {
			continue // the module itself is not a signature
		}
		if len(b.Layers)+len(b.Envelope.Signatures) > maxBlobs {
			return nil, fmt.Errorf("%w: blob %s has %d layers and %d signatures, at most %d", ErrArtefact, e.Name(), len(b.Layers), len(b.Envelope.Signatures), maxBlobs)
		}
		for _, d := range b.Layers {
			if d.MediaType != cosignType {
				continue
			}
			payload, err := a.blob(ctx, d.Digest, maxSignature)
			if err != nil {
				return nil, err
			}
			if a.named(payload) {
				list = append(list, signature{payload, d.Annotations["dev.cosignproject.cosign/signature"]})
			}
		}
		if v := &b.Envelope; len(v.Signatures) > 0 && a.named(v.Payload) {
			payload := fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(v.PayloadType), v.PayloadType, len(v.Payload), v.Payload)
			for _, s := range v.Signatures {
				list = append(list, signature{payload, s.Sig})
			}
		}
		if len(list) > maxBlobs {
			return nil, fmt.Errorf("%w: more than %d signatures", ErrArtefact, maxBlobs)
		}
	}
	return list, nil
}

// named reports whether a payload signs the module's manifest. Other statements of a key, for example about a build, do
// not.
func (a *artefact) named(payload []byte) bool {
	var p struct {
		Critical struct { // field of cosign 2
			Type  string
			Image struct {
				Digest string `json:"docker-manifest-digest"`
			}
		}
		PredicateType string // field of an in-toto statement
		Subject       []struct{ Digest struct{ SHA256 string } }
	}
	if json.Unmarshal(payload, &p) != nil {
		return false
	}
	for _, s := range p.Subject {
		if p.PredicateType == cosignSigns && "sha256:"+s.Digest.SHA256 == a.manifest {
			return true
		}
	}
	return p.Critical.Type == "cosign container image signature" && p.Critical.Image.Digest == a.manifest
}
