package main

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// pythonClient is the directory of the Python client.
const pythonClient = "host/client/python"

// project holds the fields of the client's pyproject.toml that a wheel needs.
type project struct {
	Project struct {
		Name, Version, Description string
		RequiresPython             string `toml:"requires-python"`
		License                    struct{ Text string }
		Dependencies               []string
		Optional                   map[string][]string          `toml:"optional-dependencies"`
		EntryPoints                map[string]map[string]string `toml:"entry-points"`
	}
}

// wheelMachine maps architectures to their names in wheels.
var wheelMachine = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// gitVersion matches a version between two releases, as .ci/version makes it.
var gitVersion = regexp.MustCompile(`~git(\d+)\.`)

// wheelVersion converts a package's version to the form of PEP 440.
func wheelVersion(version string) string {
	version = gitVersion.ReplaceAllString(version, ".dev$1+")
	version = strings.Replace(version, "~rc.", "rc", 1)
	return strings.Replace(version, "~", ".dev0+", 1)
}

// wheel writes a wheel with a binary, the Python client and its connectors, in the binary distribution format of
// https://packaging.python.org/en/latest/specifications/binary-distribution-format/.
func (r *release) wheel(arch, binary string) error {
	var p project
	if _, err := toml.DecodeFile(filepath.Join(pythonClient, "pyproject.toml"), &p); err != nil {
		return err
	}
	version := wheelVersion(r.version)
	name := p.Project.Name + "-" + version
	tag := "py3-none-manylinux_2_17_" + wheelMachine[arch]
	files := map[string][]byte{} // by path in the wheel
	read := func(as, path string) (err error) {
		files[as], err = os.ReadFile(path)
		return err
	}
	script := name + ".data/scripts/kvhost"
	if err := read(script, binary); err != nil {
		return err
	}
	if err := read(name+".dist-info/licenses/LICENSE", "LICENSE"); err != nil {
		return err
	}
	err := filepath.WalkDir(filepath.Join(pythonClient, "kvhost"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !slices.Contains([]string{".py", ".pyi", ".md", ".typed"}, filepath.Ext(path)) {
			return err
		}
		as, err := filepath.Rel(pythonClient, path)
		if err != nil {
			return err
		}
		return read(as, path)
	})
	if err != nil {
		return err
	}
	share := map[string]string{ // files by path below share
		"bash-completion/completions/kvhost":    filepath.Join(r.share, "bash"),
		"fish/vendor_completions.d/kvhost.fish": filepath.Join(r.share, "fish"),
		"zsh/site-functions/_kvhost":            filepath.Join(r.share, "zsh"),
	}
	for _, page := range pages(r.man) {
		share["man/man"+page[len(page)-1:]+"/"+page] = filepath.Join(r.man, page)
	}
	for _, page := range pages(r.html) {
		share["kvhost/manual/"+page] = filepath.Join(r.html, page)
	}
	for as, path := range share {
		if err := read(name+".data/data/share/"+as, path); err != nil {
			return err
		}
	}
	readme, err := os.ReadFile(filepath.Join(pythonClient, "README.md"))
	if err != nil {
		return err
	}
	files[name+".dist-info/METADATA"] = p.metadata(version, readme)
	files[name+".dist-info/entry_points.txt"] = p.entryPoints()
	files[name+".dist-info/WHEEL"] = fmt.Appendf(nil, "Wheel-Version: 1.0\nGenerator: kvhost\nRoot-Is-Purelib: false\nTag: %s\n", tag)
	record := name + ".dist-info/RECORD"
	names := slices.Sorted(maps.Keys(files))
	for _, n := range names {
		sum := sha256.Sum256(files[n])
		files[record] = fmt.Appendf(files[record], "%s,sha256=%s,%d\n", n, base64.RawURLEncoding.EncodeToString(sum[:]), len(files[n]))
	}
	files[record] = append(files[record], record+",,\n"...)
	return r.zip(filepath.Join(r.out, name+"-"+tag+".whl"), append(names, record), files, script)
}

func (p *project) metadata(version string, readme []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "Metadata-Version: 2.4\nName: %s\nVersion: %s\nSummary: %s\nLicense-Expression: %s\nLicense-File: LICENSE\nRequires-Python: %s\n",
		p.Project.Name, version, p.Project.Description, p.Project.License.Text, p.Project.RequiresPython)
	for _, d := range p.Project.Dependencies {
		fmt.Fprintf(&b, "Requires-Dist: %s\n", d)
	}
	for _, extra := range slices.Sorted(maps.Keys(p.Project.Optional)) {
		fmt.Fprintf(&b, "Provides-Extra: %s\n", extra)
		for _, d := range p.Project.Optional[extra] {
			fmt.Fprintf(&b, "Requires-Dist: %s; extra == %q\n", d, extra)
		}
	}
	fmt.Fprintf(&b, "Description-Content-Type: text/markdown\n\n%s", readme)
	return b.Bytes()
}

func (p *project) entryPoints() []byte {
	var b bytes.Buffer
	for _, group := range slices.Sorted(maps.Keys(p.Project.EntryPoints)) {
		fmt.Fprintf(&b, "[%s]\n", group)
		for _, name := range slices.Sorted(maps.Keys(p.Project.EntryPoints[group])) {
			fmt.Fprintf(&b, "%s = %s\n", name, p.Project.EntryPoints[group][name])
		}
	}
	return b.Bytes()
}

// zip writes an archive of files in the given order. One of them is executable.
func (r *release) zip(path string, names []string, files map[string][]byte, program string) error {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, n := range names {
		h := &zip.FileHeader{Name: n, Method: zip.Deflate, Modified: r.epoch}
		h.SetMode(0o644)
		if n == program {
			h.SetMode(0o755)
		}
		w, err := z.CreateHeader(h)
		if err != nil {
			return err
		}
		if _, err := w.Write(files[n]); err != nil {
			return err
		}
	}
	if err := z.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}
