package main

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

var withImage = flag.Bool("image", false, "build and run the container image, which takes minutes")

// image is builder's command on storage of its own.
func image(storage string, args ...string) []string {
	return append([]string{"--root", filepath.Join(storage, "root"), "--runroot", filepath.Join(storage, "run"),
		"--storage-driver", "vfs"}, args...)
}

// The Dockerfile, and the layout of a release, give an image whose host is a user without capabilities, which serves as it is. buildah
// builds and runs them without a daemon; the bases are made here, because no registry is at hand. It is for make torture.
func TestImage(t *testing.T) {
	if !*withImage {
		t.Skip("make torture builds the image")
	}
	testenv.Need(t, testenv.Buildah)
	base, tally := bareDebian(t), testenv.NewTally(t, "image")
	storage, context := t.TempDir(), t.TempDir()
	buildah := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(must(t, "buildah", image(storage, args...)...))
	}
	own := binary(t)
	testenv.OK(t, os.Link(own, filepath.Join(context, "kvhost")))
	here, err := os.Getwd()
	testenv.OK(t, err)
	r := &release{version: distVersion, out: t.TempDir(), archs: []string{"amd64"}, html: filepath.Join(context, "manual")}
	t.Chdir(testenv.Root())
	testenv.OK(t, r.site(r.html))
	must(t, "make", ".build/base/amd64.tar")
	r.base = ".build/base"
	testenv.OK(t, r.image(map[string]string{"amd64": own}))
	t.Chdir(here)
	made := buildah("from", "scratch")
	buildah("add", "--quiet", made, base, "/")
	buildah("commit", "--quiet", "--rm", made, "localhost/base")
	buildah("bud", "--isolation", "chroot", "--build-arg", "BASE=localhost/base", "--tag", "localhost/kvhost",
		"--file", "container/Dockerfile", context)

	pulled := buildah("pull", "--quiet", "oci-archive:"+filepath.Join(r.out, "kvhost_"+distVersion+"_image.tar"))
	buildah("tag", pulled, "localhost/released")
	for _, name := range []string{"localhost/kvhost", "localhost/released"} {
		t.Run(filepath.Base(name), func(t *testing.T) {
			serveImage(t, storage, name)
			tally.Add(1, 0, 0)
		})
	}
}

// serveImage runs the host of an image.
func serveImage(t *testing.T, storage, name string) {
	buildah := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(must(t, "buildah", image(storage, args...)...))
	}
	var about struct {
		OCIv1 struct {
			Config struct {
				User            string
				Entrypoint, Cmd []string
			}
		}
	}
	testenv.OK(t, json.Unmarshal([]byte(buildah("inspect", "--type", "image", name)), &about))
	if c := about.OCIv1.Config; c.User != "10001:10001" || len(c.Entrypoint) != 1 || len(c.Cmd) != 2 {
		t.Errorf("the image's configuration: got %+v, want user 10001, one entry point, two arguments", c)
	}
	container := buildah("from", name)
	run := func(args ...string) []string {
		return image(storage, append([]string{"run", "--isolation", "chroot", container, "--"}, args...)...)
	}
	// The init container of the chart makes its directories with this.
	must(t, "buildah", run("install", "-d", "/tmp/made")...)
	const config = "/etc/kvhost/kvhost.toml"
	out := ""
	for n := 0; out == "" && n < 5; n++ { // a busy buildah loses what a short command writes
		out = must(t, "buildah", run("kvhost", "check", "--config", config)...)
	}
	if strings.Contains(out, "policies:") ||
		!strings.Contains(out, "/var/lib/kvhost/kv (does not exist yet") {
		t.Errorf("check:\n%s", out)
	}
	address := outside(t)
	cmd := exec.Command("buildah", run("kvhost", "--config", config, "--http-listen", address)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	s := serve(t, cmd)
	s.unprivileged(imageUser)
	s.probed(address)
	if strings.Contains(s.logged(), "policy cache") {
		t.Errorf("the image has no cache:\n%s", s.logged())
	}
	s.stop()
}

// The user of the image is the manifests'.
func TestImageUser(t *testing.T) {
	if !strings.Contains(read(t, "container/Dockerfile"), "\nUSER 10001:10001\n") ||
		!strings.Contains(read(t, "kubernetes/chart/values.yaml"), "\nuser: 10001\n") {
		t.Errorf("the image and the manifests have not both the user %d", imageUser)
	}
}

var (
	composeContext = regexp.MustCompile(`context: ([^,}\s]+)[\s,]+dockerfile: ([^,}\s]+)`)
	composeMount   = regexp.MustCompile(`"(\.\.[^:"]+):`)
	composeScrape  = regexp.MustCompile(`(?s)  scrape:\n    content: \|\n(.*?)\n  sources:`)
)

// What the compose file names is there, its engine finds the socket where the image's configuration has it, and Prometheus takes
// its part.
func TestCompose(t *testing.T) {
	text := read(t, "compose.yaml")
	var named []string
	for _, m := range composeContext.FindAllStringSubmatch(text, -1) {
		if strings.HasSuffix(m[1], "bin") { // is built
			m[1] = "../../cmd"
		}
		named = append(named, filepath.Join(m[1], m[2]))
	}
	for _, m := range composeMount.FindAllStringSubmatch(text, -1) {
		named = append(named, m[1])
	}
	if len(named) != 5 {
		t.Errorf("the compose file names %q, want three Dockerfiles and two files", named)
	}
	for _, name := range named {
		read(t, name)
	}
	for _, m := range regexp.MustCompile(`socket = "([^"]+)"`).FindAllStringSubmatch(read(t, "container/Dockerfile"), -1) {
		if strings.Count(text, m[1]) != 2 {
			t.Errorf("the image's socket %s is named %d times, want by the engine and by the probe", m[1], strings.Count(text, m[1]))
		}
	}
	if !strings.Contains(text, "VLLM_CPU_KVCACHE_SPACE: ") {
		t.Error("the engine on a processor takes nearly all memory, and ends where the host has some")
	}
	testenv.Need(t, testenv.Promtool)
	dir := t.TempDir()
	scrape := composeScrape.FindStringSubmatch(text)
	if scrape == nil {
		t.Fatal("the compose file has no configuration of Prometheus")
	}
	write(t, filepath.Join(dir, "prometheus.yml"), strings.ReplaceAll(scrape[1], "\n      ", "\n")[6:], 0o600)
	write(t, filepath.Join(dir, "alerts.yml"), read(t, monitoring+"alerts.yml"), 0o600)
	if out, err := promtool(t, "check", "config", filepath.Join(dir, "prometheus.yml")); err != nil {
		t.Errorf("check the configuration of Prometheus: %v\n%s", err, out)
	}
}
