package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// Media types. A module's is the one that registries know for WebAssembly.
const (
	manifestType  = "application/vnd.oci.image.manifest.v1+json"
	ArtifactType  = "application/vnd.kvhost.policy.v1"
	moduleType    = "application/wasm"
	signatureType = "application/vnd.kvhost.policy.signature.v1+minisign"
	emptyType     = "application/vnd.oci.empty.v1+json"
)

// Empty is the configuration that a manifest must have, and a policy has no use for.
var Empty = []byte("{}")

// Limits of what a registry sends. A module's is the host's, given by the caller.
const (
	maxManifest  = 64 << 10
	MaxSignature = 64 << 10
)

// Descriptor names bytes.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// describe is the descriptor of bytes.
func describe(mediaType string, b []byte) Descriptor {
	return Descriptor{MediaType: mediaType, Digest: digestOf(b), Size: int64(len(b))}
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Check compares bytes with their descriptor.
func (d *Descriptor) Check(what string, b []byte) error {
	if got := digestOf(b); got != d.Digest || int64(len(b)) != d.Size {
		return fmt.Errorf("%w: the %s has %d bytes and %s, its manifest says %d and %s", ErrDigest, what, len(b), got, d.Size, d.Digest)
	}
	return nil
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	ArtifactType  string       `json:"artifactType"`
	Config        Descriptor   `json:"config"`
	Layers        []Descriptor `json:"layers"`
}

// Artifact is a policy with its manifest. Signature is nil where there is none.
type Artifact struct {
	Digest                      string // of the manifest: it names the whole
	Manifest, Module, Signature []byte
}

// titleKey is the annotation with a layer's file name, by which other tools save it.
const titleKey = "org.opencontainers.image.title"

// Pack makes an artifact. The same bytes make the same manifest.
func Pack(name string, module, signature []byte) (*Artifact, error) {
	m := manifest{SchemaVersion: 2, MediaType: manifestType, ArtifactType: ArtifactType, Config: describe(emptyType, Empty)}
	add := func(mediaType, title string, b []byte) {
		d := describe(mediaType, b)
		d.Annotations = map[string]string{titleKey: title}
		m.Layers = append(m.Layers, d)
	}
	add(moduleType, name+".wasm", module)
	if signature != nil {
		add(signatureType, name+".wasm.minisig", signature)
	}
	b, err := json.Marshal(&m)
	if err != nil {
		return nil, err
	}
	return &Artifact{Digest: digestOf(b), Manifest: b, Module: module, Signature: signature}, nil
}

// Layers reads a manifest, which must have the digest that names it, unless that is empty: the descriptors of the module, of at most
// maxModule bytes, and of its signature, which is nil where there is none.
func Layers(digest string, b []byte, maxModule int64) (module, signature *Descriptor, err error) {
	bad := func(format string, args ...any) (*Descriptor, *Descriptor, error) {
		return nil, nil, fmt.Errorf("%w: %s", ErrManifest, fmt.Sprintf(format, args...))
	}
	if got := digestOf(b); digest != "" && got != digest {
		return nil, nil, fmt.Errorf("%w: the manifest has %s, wanted is %s", ErrDigest, got, digest)
	}
	var m manifest
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&m); err != nil || d.More() {
		return bad("no JSON object alone: %v", err)
	}
	if m.SchemaVersion != 2 || m.MediaType != manifestType || m.ArtifactType != ArtifactType {
		return bad("%.100q of type %.100q, want %s of type %s", m.MediaType, m.ArtifactType, manifestType, ArtifactType)
	}
	for i := range m.Layers {
		l, limit := &m.Layers[i], maxModule
		to := &module
		switch l.MediaType {
		case moduleType:
		case signatureType:
			to, limit = &signature, MaxSignature
		default:
			return bad("a layer of type %.100q", l.MediaType)
		}
		switch {
		case *to != nil:
			return bad("two layers of type %s", l.MediaType)
		case !digestForm.MatchString(l.Digest):
			return bad("digest %.100q of a layer", l.Digest)
		case l.Size <= 0 || l.Size > limit:
			return bad("a layer of type %s has %d bytes, at most %d", l.MediaType, l.Size, limit)
		}
		*to = l
	}
	if module == nil {
		return bad("no layer of type %s", moduleType)
	}
	return module, signature, nil
}
