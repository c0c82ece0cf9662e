package main

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

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
