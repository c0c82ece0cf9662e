// Command deploy writes the files of a release: for each architecture a tarball, a deb, an rpm, a wheel for Python, and a bill of the
// binary's materials; the Helm chart; and the checksums. With -release it also writes the image, the notes and the signatures. Two runs on
// one commit, and on the same bases of the image, write the same bytes. The tests install, run and check the content of this directory and
// the output of the command.
//
//	go run ./examples/deploy -version 1.2.3 -nfpm .build/bin/nfpm   # in the top directory
//	go run ./examples/deploy -version 1.2.3 -manual bin/manual      # the manual alone
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

type release struct {
	version string
	out     string
	nfpm    string
	overlay string            // overlay for go build; empty means none
	key     string            // file of the minisign key for signatures; empty means none
	cosign  *ecdsa.PrivateKey // key for cosign signatures; nil means none
	base    string            // directory of the image's bases; empty means that no image is written
	archs   []string
	strict  bool      // refuse any version but that of a release
	epoch   time.Time // time of all files
	own     string    // binary for this machine's architecture
	html    string    // directory of the manual as a site
	man     string    // directory of the manual pages
	share   string    // directory of completions and documents
}

func main() {
	r := release{}
	flag.StringVar(&r.version, "version", "", "version of the release")
	flag.StringVar(&r.out, "out", ".build/dist", "directory to write to, which is emptied before")
	flag.StringVar(&r.nfpm, "nfpm", ".build/bin/nfpm", "the command that makes packages")
	flag.StringVar(&r.overlay, "overlay", "", "passed to go build")
	flag.BoolVar(&r.strict, "release", false, "write notes and a signature, too; the version must be that of a release")
	flag.StringVar(&r.key, "key", "", "minisign's secret key, with which -release signs")
	cosign := flag.String("cosign-key", "", "cosign's private key, with which -release signs, too")
	flag.StringVar(&r.base, "base", "", "directory with ARCHITECTURE.tar, which the image of -release stands on")
	manual := flag.String("manual", "", "write the manual as a site to this directory, and nothing else")
	archs := flag.String("arch", "amd64,arm64", "architectures")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r.archs = strings.Split(*archs, ",")
	err := r.readCosignKey(*cosign)
	switch {
	case err != nil:
	case *manual != "":
		err = r.site(*manual)
	default:
		err = r.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "deploy:", err)
		stop()
		os.Exit(1)
	}
}

func (r *release) run(ctx context.Context) error {
	r.version = packageVersion(r.version)
	if err := r.date(ctx); err != nil {
		return err
	}
	if r.strict {
		if err := r.isRelease(); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "kvhost-dist-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	r.own = filepath.Join(work, "own", "kvhost")
	if err := r.build(ctx, runtime.GOARCH, r.own); err != nil {
		return err
	}
	r.man = filepath.Join(work, "man")
	if err := r.manual(ctx, r.own, r.man); err != nil {
		return err
	}
	r.html = filepath.Join(work, "manual")
	if err := r.site(r.html); err != nil {
		return err
	}
	r.share = filepath.Join(work, "share")
	if err := r.shared(ctx, r.own, r.share); err != nil {
		return err
	}
	binaries := map[string]string{runtime.GOARCH: r.own}
	for _, arch := range r.archs {
		if binaries[arch] == "" {
			binaries[arch] = filepath.Join(work, arch, "kvhost")
			if err := r.build(ctx, arch, binaries[arch]); err != nil {
				return fmt.Errorf("%s: %w", arch, err)
			}
		}
		base := filepath.Join(r.out, "kvhost_"+r.version+"_linux_"+arch)
		if err := errors.Join(r.packages(ctx, arch, base, binaries[arch]), r.wheel(arch, binaries[arch])); err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
	}
	errs := []error{r.chart()}
	if r.strict {
		errs = append(errs, r.notes(), r.image(binaries))
	}
	errs = append(errs, r.checksums())
	if r.strict {
		errs = append(errs, r.sign())
	}
	return errors.Join(errs...)
}

// packageVersion converts a version to the form of packages. It begins with a digit. The suffix of a version before a release begins with
// ~, because dpkg and rpm sort that before the release, and use - for their own suffixes.
func packageVersion(version string) string {
	version = strings.TrimPrefix(version, "v")
	if version == "" || version[0] < '0' || version[0] > '9' || !strings.Contains(version, ".") {
		version = "0.0.0~" + version
	}
	return strings.ReplaceAll(version, "-", "~")
}

// date sets the time of all files to SOURCE_DATE_EPOCH, or to that of the commit.
func (r *release) date(ctx context.Context) error {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := exec.CommandContext(ctx, "git", "log", "-1", "--format=%ct").Output()
		if err != nil {
			return fmt.Errorf("the date of the commit: %w; set SOURCE_DATE_EPOCH outside of git", err)
		}
		text = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	r.epoch = time.Unix(seconds, 0).UTC()
	return nil
}

// build builds the binary for an architecture.
func (r *release) build(ctx context.Context, arch, binary string) error {
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags=grpcnotrace", "-buildvcs=false", "-overlay", r.overlay,
		"-ldflags", "-s -w -X main.version="+r.version+" -X github.com/kvhost/kvhost/host/command.wheel="+wheelVersion(r.version), "-o", binary, "./cmd/kvhost")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// packages writes all packages that contain a binary.
func (r *release) packages(ctx context.Context, arch, base, binary string) error {
	bill, err := materials(binary, r.version)
	if err != nil {
		return err
	}
	if err := os.WriteFile(base+".cdx.json", bill, 0o644); err != nil {
		return err
	}
	if err := r.tarball(base+".tar.gz", binary); err != nil {
		return err
	}
	for _, kind := range []string{"deb", "rpm"} {
		pack := exec.CommandContext(ctx, r.nfpm, "package", "--config", "examples/deploy/package/nfpm.yaml", "--packager", kind,
			"--target", base+"."+kind)
		pack.Env = append(os.Environ(), "VERSION="+r.version, "ARCH="+arch, "BINARY="+binary, "MAN="+r.man, "HTML="+r.html, "SHARE="+r.share,
			"SOURCE_DATE_EPOCH="+strconv.FormatInt(r.epoch.Unix(), 10))
		if out, err := pack.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", r.nfpm, err, out)
		}
	}
	return nil
}

// inTarball lists the files that accompany the binary.
var inTarball = []string{
	"LICENSE", "README.md", "examples/kvhost.toml", "examples/deploy/kvhost.toml",
	"examples/deploy/systemd/kvhost.service", "examples/deploy/systemd/kvhost@.service", "examples/monitoring/alerts.yml",
	"examples/monitoring/dashboard.json",
}

func (r *release) tarball(name, binary string) error {
	top := strings.TrimSuffix(filepath.Base(name), ".tar.gz") + "/"
	return r.archive(name, func(add func(path, as string, mode int64) error) error {
		errs := []error{add(binary, top+"kvhost", 0o755)}
		for _, path := range inTarball {
			errs = append(errs, add(path, top+path, 0o644))
		}
		for _, dir := range []string{r.man, r.html} {
			for _, page := range pages(dir) {
				errs = append(errs, add(filepath.Join(dir, page), top+filepath.Base(dir)+"/"+page, 0o644))
			}
		}
		return errors.Join(errs...)
	})
}

// checksums writes SHA256SUMS for sha256sum -c.
func (r *release) checksums() error {
	list, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var lines []string
	for _, e := range list {
		text, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		lines = append(lines, fmt.Sprintf("%x  %s\n", sha256.Sum256(text), e.Name()))
	}
	slices.SortFunc(lines, func(a, b string) int { return strings.Compare(a[66:], b[66:]) })
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(strings.Join(lines, "")), 0o644)
}
