package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"aead.dev/minisign"
	"github.com/BurntSushi/toml"
)

// releaseVersion matches the version of a release or of its candidate, in the form of packages.
var releaseVersion = regexp.MustCompile(`^(\d+\.\d+\.\d+)(~rc\.\d+)?$`)

// isRelease returns an error unless the version is that of a release and matches the sources.
func (r *release) isRelease() error {
	v := releaseVersion.FindStringSubmatch(r.version)
	if v == nil {
		return fmt.Errorf("%s is the version of no release: check out its tag, such as v0.1.0-rc.1, or give VERSION=0.1.0-rc.1", r.version)
	}
	var p project
	if _, err := toml.DecodeFile(filepath.Join(pythonClient, "pyproject.toml"), &p); err != nil {
		return err
	}
	if p.Project.Version != v[1] {
		return fmt.Errorf("%s is to be released, and %s/pyproject.toml is of %s", r.version, pythonClient, p.Project.Version)
	}
	return nil
}

// chartVersion converts a package's version to Semantic Versioning, which Helm requires.
func chartVersion(version string) string { return strings.Replace(version, "~", "-", 1) }

var versionInChart = regexp.MustCompile(`(?m)^(version: |appVersion: ).*$`)

// chart writes the Helm chart as helm package does, with the release's version.
func (r *release) chart() error {
	const from = "examples/deploy/kubernetes/chart"
	version := chartVersion(r.version)
	return r.archive(filepath.Join(r.out, "kvhost-"+version+".tgz"), func(add func(path, as string, mode int64) error) error {
		return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			as, err := filepath.Rel(from, path)
			if err == nil && as == "Chart.yaml" {
				var text []byte
				if text, err = os.ReadFile(path); err != nil {
					return err
				}
				path = filepath.Join(r.share, as)
				err = os.WriteFile(path, versionInChart.ReplaceAll(text, []byte(`${1}"`+version+`"`)), 0o644)
			}
			return errors.Join(err, add(path, "kvhost/"+as, 0o644))
		})
	})
}

// archive writes a compressed archive of the files that fill adds.
func (r *release) archive(name string, fill func(add func(path, as string, mode int64) error) error) (err error) {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z := gzip.NewWriter(f)
	t := tar.NewWriter(z)
	err = fill(func(path, as string, mode int64) error {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return r.entry(t, as, mode, text)
	})
	return errors.Join(err, t.Close(), z.Close())
}

// entry adds a file to an archive.
func (r *release) entry(t *tar.Writer, name string, mode int64, text []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(text)), ModTime: r.epoch,
		Uname: "root", Gname: "root", Format: tar.FormatUSTAR}
	err := t.WriteHeader(h)
	if err == nil {
		_, err = t.Write(text)
	}
	return err
}

// notes writes NOTES.md: the changelog of the release, the instructions for an upgrade, and the guarantees for later
// releases.
func (r *release) notes() error {
	const changes, promises = ".github/CHANGELOG.md", "host/docs/releases.md"
	log, err := os.ReadFile(changes)
	if err != nil {
		return err
	}
	of := section(string(log), chartVersion(r.version))
	if of == "" && strings.Contains(r.version, "~") {
		of = section(string(log), "Unreleased")
	}
	if of == "" {
		return fmt.Errorf("%s has no section %q", changes, "## "+chartVersion(r.version))
	}
	kept, err := os.ReadFile(promises)
	if err != nil {
		return err
	}
	_, kept, _ = bytes.Cut(kept, []byte("\n")) // without its title
	text := append(linked(changes, []byte("# kvhost "+chartVersion(r.version)+"\n\n"+of)), linked(promises, kept)...)
	return os.WriteFile(filepath.Join(r.out, "NOTES.md"), text, 0o644)
}

// section returns the text below a heading of the second level. It is empty if there is none.
func section(text, title string) string {
	_, text, found := strings.Cut(text, "\n## "+title+"\n")
	if !found {
		return ""
	}
	text, _, _ = strings.Cut(text, "\n## ")
	return strings.TrimSpace(text) + "\n"
}

// sign writes the signatures of SHA256SUMS, one for each given key.
func (r *release) sign() error {
	sums, err := os.ReadFile(filepath.Join(r.out, "SHA256SUMS"))
	if err != nil {
		return err
	}
	if r.cosign == nil {
		fmt.Println("SHA256SUMS and the image have no signature of cosign's: COSIGN_KEY names no key file")
	} else if err := signBlob(r.cosign, sums, filepath.Join(r.out, "SHA256SUMS.sig")); err != nil {
		return err
	}
	return r.minisign(sums)
}

// minisign writes SHA256SUMS.minisig with a key of `minisign -G -W`, or of `minisign -G` with its password in
// MINISIGN_PASSWORD.
func (r *release) minisign(sums []byte) error {
	if r.key == "" {
		fmt.Println("SHA256SUMS has no signature of minisign's: MINISIGN_KEY names no key file")
		return nil
	}
	text, err := os.ReadFile(r.key)
	if err != nil {
		return err
	}
	var key minisign.PrivateKey
	if minisign.IsEncrypted(text) {
		key, err = minisign.DecryptKey(os.Getenv("MINISIGN_PASSWORD"), text)
	} else {
		err = key.UnmarshalText(text)
	}
	if err != nil {
		return fmt.Errorf("the key %s: %w", r.key, err)
	}
	signed := minisign.SignWithComments(key, sums, "kvhost "+r.version, "signature of SHA256SUMS")
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS.minisig"), signed, 0o644)
}
