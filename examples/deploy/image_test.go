package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// archived are the files of an archive, by name, and what it says of them.
func archived(t *testing.T, text []byte) (map[string][]byte, map[string]*tar.Header) {
	t.Helper()
	files, about := map[string][]byte{}, map[string]*tar.Header{}
	for r := tar.NewReader(bytes.NewReader(text)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, about
		}
		testenv.OK(t, err)
		if about[h.Name] != nil {
			t.Errorf("%s is there twice", h.Name)
		}
		files[h.Name], err = io.ReadAll(r)
		testenv.OK(t, err)
		about[h.Name] = h
	}
}

// The image is a layout of both architectures: every digest is of what it names, its layers are the base and what the Dockerfile adds,
// cosign's key has signed it, and another run writes the same bytes.
func TestImageLayout(t *testing.T) {
	t.Chdir(testenv.Root())
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testenv.OK(t, err)
	base, binaries := t.TempDir(), map[string]string{}
	for _, arch := range []string{"amd64", "arm64"} {
		binaries[arch] = filepath.Join(t.TempDir(), "kvhost")
		write(t, binaries[arch], "the program of "+arch, 0o600)
		write(t, filepath.Join(base, arch+".tar"), "the base of "+arch, 0o600)
	}
	r := &release{version: "1.2.3~rc.1", epoch: time.Unix(1700000000, 0).UTC(), archs: []string{"amd64", "arm64"}, base: base, cosign: key,
		html: t.TempDir()}
	write(t, filepath.Join(r.html, "index.html"), "the manual", 0o600)
	var written []string
	for range 2 {
		r.out = t.TempDir()
		testenv.OK(t, r.image(binaries))
		written = append(written, read(t, filepath.Join(r.out, "kvhost_1.2.3~rc.1_image.tar")))
	}
	if written[0] != written[1] {
		t.Error("two runs wrote different images")
	}

	files, _ := archived(t, []byte(written[0]))
	if got := string(files["oci-layout"]); got != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout: %s", got)
	}
	unread := maps.Clone(files)
	delete(unread, "oci-layout")
	delete(unread, "index.json")
	blob := func(d descriptor) []byte {
		t.Helper()
		name := "blobs/sha256/" + strings.TrimPrefix(d.Digest, "sha256:")
		text := files[name]
		if d.Digest != fmt.Sprintf("sha256:%x", sha256.Sum256(text)) || d.Size != len(text) {
			t.Errorf("%s has %d bytes, and is of other ones", d.Digest, d.Size)
		}
		delete(unread, name)
		return text
	}
	listed := func(text []byte) (m manifest) {
		t.Helper()
		testenv.OK(t, json.Unmarshal(text, &m))
		if m.Schema != 2 {
			t.Errorf("schema %d in %s", m.Schema, text)
		}
		return m
	}
	top := listed(files["index.json"])
	if len(top.Manifests) != 2 {
		t.Fatalf("index: %s, want the image and its signature", files["index.json"])
	}
	image, signed := top.Manifests[0], top.Manifests[1]
	if name := image.Annotations["org.opencontainers.image.ref.name"]; name != "1.2.3-rc.1" {
		t.Errorf("the image is named %q", name)
	}
	of := listed(blob(image))
	if len(of.Manifests) != 2 {
		t.Fatalf("%d architectures, want 2", len(of.Manifests))
	}
	recipe := read(t, "examples/deploy/container/Dockerfile")
	for i, arch := range r.archs {
		d := of.Manifests[i]
		m := listed(blob(d))
		var c imageConfig
		testenv.OK(t, json.Unmarshal(blob(*m.Config), &c))
		if *d.Platform != (platform{arch, "linux"}) || c.platform != *d.Platform || c.Created != "2023-11-14T22:13:20Z" {
			t.Errorf("%s: platform %+v and %+v, made at %s", arch, d.Platform, c.platform, c.Created)
		}
		for _, line := range []string{"USER " + c.Config.User, "WORKDIR " + c.Config.WorkingDir, "ENV " + strings.Join(c.Config.Env[1:], " "),
			`ENTRYPOINT ["` + strings.Join(c.Config.Entrypoint, `", "`) + `"]`, `CMD ["` + strings.Join(c.Config.Cmd, `", "`) + `"]`} {
			if !strings.Contains(recipe, "\n"+line+"\n") {
				t.Errorf("%s: %q is not what the Dockerfile has", arch, line)
			}
		}
		if _, ok := c.Config.Ports["9476/tcp"]; !ok || len(m.Layers) != 2 || len(c.RootFS.Diffs) != 2 {
			t.Fatalf("%s: ports %v, %d layers, %d contents", arch, c.Config.Ports, len(m.Layers), len(c.RootFS.Diffs))
		}
		var layers [][]byte
		for i, layer := range m.Layers {
			z, err := gzip.NewReader(bytes.NewReader(blob(layer)))
			testenv.OK(t, err)
			text, err := io.ReadAll(z)
			testenv.OK(t, err)
			if c.RootFS.Diffs[i] != fmt.Sprintf("sha256:%x", sha256.Sum256(text)) {
				t.Errorf("%s: layer %d is not what the configuration names", arch, i)
			}
			layers = append(layers, text)
		}
		if string(layers[0]) != "the base of "+arch {
			t.Errorf("%s: base %q", arch, layers[0])
		}
		own, about := archived(t, layers[1])
		if string(own["usr/bin/kvhost"]) != "the program of "+arch || about["usr/bin/kvhost"].Mode != 0o755 {
			t.Errorf("%s: program %q, %v", arch, own["usr/bin/kvhost"], about["usr/bin/kvhost"])
		}
		if string(own["usr/share/kvhost/manual/index.html"]) != "the manual" {
			t.Errorf("%s: the manual is not in it: %v", arch, about)
		}
		for line := range strings.Lines(string(own["etc/kvhost/kvhost.toml"])) {
			if !strings.Contains(recipe, "'"+strings.TrimSpace(line)+"'") {
				t.Errorf("%s: the configuration has %q, which the Dockerfile has not", arch, line)
			}
		}
		if n := strings.Count(string(own["etc/kvhost/kvhost.toml"]), "\n"); n != strings.Count(recipe, "\n      '") {
			t.Errorf("%s: the configuration has %d lines", arch, n)
		}
		for name, mode := range map[string]int64{"var/lib/kvhost/": 0o700, "run/kvhost/": 0o755} {
			if h := about[name]; h == nil || h.Mode != mode || h.Uid != imageUser || h.Gid != imageUser || h.Typeflag != tar.TypeDir {
				t.Errorf("%s: %s is %+v", arch, name, h)
			}
		}
	}

	m := listed(blob(signed))
	blob(*m.Config)
	payload := blob(m.Layers[0])
	verifies(t, key, payload, m.Layers[0].Annotations["dev.cosignproject.cosign/signature"])
	if !strings.Contains(string(payload), `"docker-manifest-digest":"`+image.Digest+`"`) ||
		signed.Annotations["org.opencontainers.image.ref.name"] != strings.Replace(image.Digest, ":", "-", 1)+".sig" {
		t.Errorf("%s is signed, under %v; the image is %s", payload, signed.Annotations, image.Digest)
	}
	if len(unread) != 0 {
		t.Errorf("files that nothing names: %v", unread)
	}
}

// verifies fails a test where a signature of cosign's form is not a key's.
func verifies(t *testing.T, key *ecdsa.PrivateKey, text []byte, signature string) {
	t.Helper()
	der, err := base64.StdEncoding.DecodeString(signature)
	sum := sha256.Sum256(text)
	if err != nil || !ecdsa.VerifyASN1(&key.PublicKey, sum[:], der) {
		t.Errorf("%q is no signature of %q: %v", signature, text, err)
	}
}

// lockedKey is a key of nothing with the password pw, by the library with which cosign v2.6.5 writes its keys
// (secure-systems-lab/go-securesystemslib v0.9.1).
const lockedKey = `-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----
eyJrZGYiOnsibmFtZSI6InNjcnlwdCIsInBhcmFtcyI6eyJOIjo2NTUzNiwiciI6
OCwicCI6MX0sInNhbHQiOiJHR3FmN1F2UFljNTFQWFJaYXI5bXRxTXFBd0szbU8v
UEhXbTI3QXIyNHdzPSJ9LCJjaXBoZXIiOnsibmFtZSI6Im5hY2wvc2VjcmV0Ym94
Iiwibm9uY2UiOiJKWDFsS1JZVzdXeU5jY0xRN3V5TmxOK2pNTjl0QmVjLyJ9LCJj
aXBoZXJ0ZXh0IjoiQ25URk9zTFlyTDJXTURmQnJNZjFLVSt3NHVRQStWMG1mdE94
c0FQZUN0Z0h1VFVnY1E2UVBwclc2c0praW5xejJxZEhsMGhLS2FIMlZmUVMwZDlj
dWpWby9XbzNtTkVEWTJ5NlpZYjNXNElsbFQrRHFBVHl2THByYTg2U1FUV0VlL2s3
dFFKSEJRTHRrR3Q5UThXVFFiTHFiOHUxRk5yUk9vbm5XdWNyMlZRMWtsMU85ZzE0
TXoyTkxMcVIwUzYyY0VWOWkvUFNkUllvQUE9PSJ9
-----END ENCRYPTED SIGSTORE PRIVATE KEY-----
`

// Keys of cosign, with a password or without, sign the checksums; another key or password is refused.
func TestSignedByCosign(t *testing.T) {
	plain, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testenv.OK(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(plain)
	testenv.OK(t, err)
	at := filepath.Join(t.TempDir(), "cosign.key")
	t.Setenv("COSIGN_PASSWORD", "pw")
	for _, text := range []string{lockedKey, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))} {
		write(t, at, text, 0o600)
		r := &release{out: t.TempDir()}
		testenv.OK(t, r.readCosignKey(at))
		write(t, filepath.Join(r.out, "SHA256SUMS"), "sums\n", 0o644)
		testenv.OK(t, r.sign())
		verifies(t, r.cosign, []byte("sums\n"), read(t, filepath.Join(r.out, "SHA256SUMS.sig")))
	}
	write(t, at, "no key", 0o600)
	if err := (&release{}).readCosignKey(at); !errors.Is(err, errKey) {
		t.Errorf("a file that is no key: %v", err)
	}
	write(t, at, lockedKey, 0o600)
	t.Setenv("COSIGN_PASSWORD", "another")
	if err := (&release{}).readCosignKey(at); err == nil || !strings.Contains(err.Error(), "COSIGN_PASSWORD") {
		t.Errorf("another password: %v", err)
	}
	testenv.OK(t, os.Remove(at))
	if (&release{}).readCosignKey(at) == nil {
		t.Error("there is no key, and no error")
	}
}
