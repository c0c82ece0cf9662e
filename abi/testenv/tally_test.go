package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A part of make torture that fails, or dies without a word, does not keep the others from running, and is counted.
func TestTortureSums(t *testing.T) {
	dir := t.TempDir()
	for name, script := range map[string]string{
		"good": `echo "part=good operations=1 kills=0 seeds=1 failures=0 seconds=1" >> $KVHOST_TALLY
echo "part=good operations=100 kills=2 seeds=3 failures=0 seconds=9" >> $KVHOST_TALLY`,
		"dies": `echo "part=dies operations=7 kills=1 seeds=1 failures=0 seconds=2" >> $KVHOST_TALLY; kill -9 $$`,
		"mute": `exit 1`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	out, err := tortureScript(dir, "dies", "mute", "good")
	const want = `part=dies operations=7 kills=1 seeds=1 failures=1 seconds=2
part=mute operations=0 kills=0 seeds=0 failures=1 seconds=0
part=good operations=100 kills=2 seeds=3 failures=0 seconds=9
part=all operations=107 kills=3 seeds=4 failures=2 seconds=11
`
	if err == nil || !strings.HasSuffix(out, want) {
		t.Errorf("torture with two failing parts: %v, and it printed\n%s", err, out)
	}
	if out, err := tortureScript(dir, "good"); err != nil || !strings.Contains(out, "part=all operations=100 ") {
		t.Errorf("torture with one good part: %v, and it printed\n%s", err, out)
	}
}

// tortureScript runs commands in dir as the parts of make torture.
func tortureScript(dir string, parts ...string) (string, error) {
	var list []string
	for _, p := range parts {
		list = append(list, p+" '"+filepath.Join(dir, p)+"'")
	}
	cmd := exec.Command("bash", "../../.ci/torture")
	cmd.Stdin = strings.NewReader(strings.Join(list, "\n") + "\n")
	out, err := cmd.CombinedOutput()
	return string(out), err
}
