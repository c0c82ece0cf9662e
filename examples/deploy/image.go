package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Media types of https://github.com/opencontainers/image-spec, and of the payload that cosign 2 signs.
const (
	indexType     = "application/vnd.oci.image.index.v1+json"
	manifestType  = "application/vnd.oci.image.manifest.v1+json"
	configType    = "application/vnd.oci.image.config.v1+json"
	layerType     = "application/vnd.oci.image.layer.v1.tar+gzip"
	signatureType = "application/vnd.dev.cosign.simplesigning.v1+json"
)

// descriptor refers to a blob by its digest.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// manifest is the manifest of an image, or an index of manifests.
type manifest struct {
	Schema    int          `json:"schemaVersion"`
	MediaType string       `json:"mediaType,omitempty"`
	Config    *descriptor  `json:"config,omitempty"`
	Layers    []descriptor `json:"layers,omitempty"`
	Manifests []descriptor `json:"manifests,omitempty"`
}

// imageConfig is the configuration of an image's containers, in the form of OCI.
type imageConfig struct {
	Created string `json:"created"`
	platform
	Config struct {
		User       string
		Ports      map[string]struct{} `json:"ExposedPorts"`
		Env        []string
		Entrypoint []string
		Cmd        []string
		WorkingDir string
		Labels     map[string]string
	} `json:"config"`
	RootFS struct {
		Type  string   `json:"type"`
		Diffs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// imageUser is the user in the image and in the manifests.
const imageUser = 10001

// dockerfile holds the additions of the Dockerfile to its base.
type dockerfile struct {
	image    imageConfig
	settings string // content of /etc/kvhost/kvhost.toml
}

var settingsLine = regexp.MustCompile(`(?m)^ +'(.*)' `)

// readDockerfile parses the project's Dockerfile, so that the content of an image is described in one place.
func readDockerfile(text string) (*dockerfile, error) {
	d := &dockerfile{}
	for _, line := range settingsLine.FindAllStringSubmatch(text, -1) {
		d.settings += line[1] + "\n"
	}
	c := &d.image.Config
	c.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	var errs []error
	for line := range strings.Lines(text) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "USER":
			c.User = rest
		case "WORKDIR":
			c.WorkingDir = rest
		case "ENV":
			c.Env = append(c.Env, strings.Fields(rest)...)
		case "EXPOSE":
			c.Ports = map[string]struct{}{rest + "/tcp": {}}
		case "ENTRYPOINT":
			errs = append(errs, json.Unmarshal([]byte(rest), &c.Entrypoint))
		case "CMD":
			errs = append(errs, json.Unmarshal([]byte(rest), &c.Cmd))
		}
	}
	return d, errors.Join(errs...)
}

// layout is an OCI image layout to which images are added.
type layout struct {
	names []string
	blobs map[string][]byte // by name
}

func (l *layout) file(name string, text []byte) {
	if _, there := l.blobs[name]; !there {
		l.names = append(l.names, name)
	}
	l.blobs[name] = text
}

func (l *layout) add(kind string, text []byte) descriptor {
	sum := fmt.Sprintf("%x", sha256.Sum256(text))
	l.file("blobs/sha256/"+sum, text)
	return descriptor{MediaType: kind, Digest: "sha256:" + sum, Size: len(text)}
}

func (l *layout) addJSON(kind string, what any) (descriptor, error) {
	text, err := json.Marshal(what)
	return l.add(kind, text), err
}

// addManifest adds an image that consists of layers.
func (l *layout) addManifest(config any, layers ...descriptor) (descriptor, error) {
	at, err := l.addJSON(configType, config)
	if err != nil {
		return at, err
	}
	return l.addJSON(manifestType, manifest{Schema: 2, MediaType: manifestType, Config: &at, Layers: layers})
}

// image writes the image of all architectures as an archive of an OCI layout. skopeo, buildah, podman and docker can load it, and cosign
// can verify it after unpacking. No daemon and no registry is needed: the base of each architecture is in r.base, and the additions come
// from the Dockerfile.
func (r *release) image(binaries map[string]string) error {
	if r.base == "" {
		fmt.Println("there is no image: -base names no directory of bases")
		return nil
	}
	text, err := os.ReadFile("examples/deploy/container/Dockerfile")
	if err != nil {
		return err
	}
	from, err := readDockerfile(string(text))
	if err != nil {
		return err
	}
	l := &layout{blobs: map[string][]byte{}}
	l.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	of := manifest{Schema: 2, MediaType: indexType}
	for _, arch := range r.archs {
		d, err := r.architecture(l, from, arch, binaries[arch])
		if err != nil {
			return fmt.Errorf("the image of %s: %w", arch, err)
		}
		of.Manifests = append(of.Manifests, d)
	}
	image, err := l.addJSON(indexType, of)
	if err != nil {
		return err
	}
	image.Annotations = map[string]string{"org.opencontainers.image.ref.name": chartVersion(r.version), "kind": "dev.cosignproject.cosign/imageIndex"}
	top := manifest{Schema: 2, MediaType: indexType, Manifests: []descriptor{image}}
	if r.cosign != nil {
		signature, err := signImage(l, r.cosign, image.Digest)
		if err != nil {
			return err
		}
		top.Manifests = append(top.Manifests, signature)
	}
	index, err := json.Marshal(top)
	if err != nil {
		return err
	}
	l.file("index.json", index)
	var out bytes.Buffer
	t := tar.NewWriter(&out)
	for _, name := range l.names {
		if err := r.entry(t, name, 0o644, l.blobs[name]); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), os.WriteFile(filepath.Join(r.out, "kvhost_"+r.version+"_image.tar"), out.Bytes(), 0o644))
}

// architecture adds the image of one architecture.
func (r *release) architecture(l *layout, from *dockerfile, arch, binary string) (descriptor, error) {
	base, err := os.ReadFile(filepath.Join(r.base, arch+".tar"))
	if err != nil {
		return descriptor{}, err
	}
	program, err := os.ReadFile(binary)
	if err != nil {
		return descriptor{}, err
	}
	var own bytes.Buffer
	t := tar.NewWriter(&own)
	put := func(name string, mode int64, owner int, text []byte) error {
		h := &tar.Header{Name: name, Mode: mode, Uid: owner, Gid: owner, Size: int64(len(text)), ModTime: r.epoch, Format: tar.FormatUSTAR,
			Typeflag: tar.TypeReg}
		if text == nil {
			h.Typeflag = tar.TypeDir
		}
		err := t.WriteHeader(h)
		if err == nil {
			_, err = t.Write(text)
		}
		return err
	}
	errs := []error{
		put("etc/kvhost/", 0o755, 0, nil), put("etc/kvhost/kvhost.toml", 0o644, 0, []byte(from.settings)),
		put("run/kvhost/", 0o755, imageUser, nil), put("usr/bin/kvhost", 0o755, 0, program), put("var/lib/kvhost/", 0o700, imageUser, nil),
	}
	for _, page := range pages(r.html) {
		text, err := os.ReadFile(filepath.Join(r.html, page))
		errs = append(errs, err, put("usr/share/kvhost/manual/"+page, 0o644, 0, text))
	}
	if err := errors.Join(append(errs, t.Close())...); err != nil {
		return descriptor{}, err
	}
	c := from.image
	c.Created, c.Architecture, c.OS = r.epoch.Format("2006-01-02T15:04:05Z"), arch, "linux"
	c.Config.Labels = map[string]string{
		"org.opencontainers.image.version": chartVersion(r.version), "org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.source": "https://github.com/kvhost/kvhost", "org.opencontainers.image.title": "kvhost",
	}
	c.RootFS.Type = "layers"
	var layers []descriptor
	for _, layer := range [][]byte{base, own.Bytes()} {
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		if _, err := z.Write(layer); err != nil {
			return descriptor{}, err
		}
		if err := z.Close(); err != nil {
			return descriptor{}, err
		}
		layers = append(layers, l.add(layerType, packed.Bytes()))
		c.RootFS.Diffs = append(c.RootFS.Diffs, fmt.Sprintf("sha256:%x", sha256.Sum256(layer)))
	}
	d, err := l.addManifest(&c, layers...)
	d.Platform = &c.platform
	return d, err
}
