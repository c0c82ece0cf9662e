package command

import (
	"strings"
	"testing"
)

// A command that does not exist is answered with the one that is most like it.
func TestDidYouMean(t *testing.T) {
	dir := t.TempDir()
	for line, want := range map[string]string{
		"srve": `did you mean "serve"?`, "policy lst": `did you mean "list"?`, "foo.toml": "--config foo.toml", "--polcy x": `did you mean "--policy"?`,
	} {
		if r := finish(t, command(t, dir, strings.Fields(line)...)); r.code != exitUsage || !strings.Contains(r.stderr, want) {
			t.Errorf("kvhost %s: %d, %s", line, r.code, r.stderr)
		}
	}
}
